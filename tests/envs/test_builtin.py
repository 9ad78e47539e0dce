"""The built-in environments, each played by policies that know what they are doing and that do not."""

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import rollway as rw
from rollway import testing
from rollway.testing import PolicyPrompt, call

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
BUILTIN = ROOT / "src" / "rollway" / "envs" / "builtin"
NAMES = ["alphabet-sort", "calculator", "guess-number", "reverse-text", "self-check"]


def load(name: str, seed: int = 0, **args: Any) -> rw.Environment:
    """By module, so that these tests need no installed entry points."""
    env = rw.load_environment(f"rollway.envs.builtin.{name.replace('-', '_')}", **args)
    env.seed = seed
    return env


def some_tasks(env: rw.Environment, count: int = 5) -> list[rw.Task]:
    return list(itertools.islice(env.tasks(), count))


def test_every_one_is_registered_and_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {name: f"rollway.envs.builtin.{name.replace('-', '_')}" for name in NAMES}
    points = {name: f"{module}:load_environment" for name, module in modules.items()}
    assert project["entry-points"]["rollway.environments"] == points
    assert sorted(one.parent.name for one in BUILTIN.glob("*/README.md")) == sorted(
        name.replace("-", "_") for name in NAMES
    )
    for name in NAMES:
        readme = BUILTIN / name.replace("-", "_") / "README.md"
        assert readme.read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize("name", NAMES)
def test_seeds_decide_and_evaluation_is_finite_and_never_trained_on(name: str) -> None:
    first = some_tasks(load(name), 300)
    assert first == some_tasks(load(name), 300)
    assert first != some_tasks(load(name, seed=1), 300)
    held_out = list(load(name).eval_tasks())
    assert held_out == list(load(name, seed=1).eval_tasks()), "runs with different seeds compare"
    assert 64 <= len(held_out) <= 128
    assert len({task.prompt for task in held_out}) == len(held_out)
    assert not {task.prompt for task in held_out} & {task.prompt for task in first}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("alphabet-sort", {"num_batches": 30}),
        ("calculator", {"steps": 0}),
        ("guess-number", {"size": 1}),
        ("reverse-text", {"min_length": 4, "max_length": 3}),
        ("self-check", {"min_length": 0}),
    ],
)
def test_args_that_make_no_sense_are_refused(name: str, args: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="need "):
        load(name, **args)


@pytest.mark.parametrize("name", NAMES)
async def test_a_policy_that_babbles_is_scored_too(name: str) -> None:
    env = load(name)
    for task in some_tasks(env, 2):
        for words in ("", "blah, blah", "<tool_call>what", "9" * 5000):
            played = await testing.play(env, task, lambda asked, words=words: words, max_tokens=6000)
            assert 0 <= played.reward < 1


async def test_reverse_text() -> None:
    env = load("reverse-text")
    for task in some_tasks(env):
        played = await testing.play(env, task, lambda asked: asked.said.split()[-1][::-1])
        assert (played.reward, played.metrics) == (1.0, {"letters_in_place": 1.0})


def halving(asked: PolicyPrompt) -> str:
    """Guesses the middle of what is left, by all that was said."""
    low, high = map(int, re.findall(r"\d+", asked.first))
    for guess, hint in zip(asked.messages[1::2], asked.messages[2::2], strict=True):
        low, high = (
            (int(guess.content) + 1, high) if hint.content == "higher" else (low, int(guess.content) - 1)
        )
    return str((low + high) // 2)


async def test_guess_number() -> None:
    env = load("guess-number")
    for task in some_tasks(env, 20):
        played = await testing.play(env, task, halving)
        assert played.stop == "found"
        assert played.rollout.num_turns <= 5
        assert played.reward == pytest.approx(1 - (played.rollout.num_turns - 1) / 6)
        assert played.metrics == {"guesses": played.rollout.num_turns, "unreadable": 0.0}
        assert len(played.rows) == 1
    silent = await testing.play(env, some_tasks(env, 1)[0], lambda asked: "?")
    assert (silent.reward, silent.stop) == (0.0, "max_turns")
    assert silent.metrics == {"guesses": 6.0, "unreadable": 6.0}


async def test_guess_number_found_with_the_last_guess() -> None:
    env = load("guess-number", max_guesses=2)
    task = some_tasks(env, 1)[0]
    played = await testing.play(
        env, task, lambda asked: str(task.answer) if len(asked.messages) > 1 else "?"
    )
    assert (played.reward, played.stop) == (0.5, "found")


TOOLS = {"+": "add", "-": "subtract", "*": "multiply"}


def computing(asked: PolicyPrompt) -> str:
    """Replaces operations by results, in the order of what tools have answered."""
    left = re.findall(r"-?\d+|[-+*](?= )", asked.first)
    for result in asked.results:
        left[:3] = [result]
    if len(left) == 1:
        return left[0]
    return call(TOOLS[left[1]], a=int(left[0]), b=int(left[2]))


async def test_calculator() -> None:
    env = load("calculator")
    for task in some_tasks(env, 10):
        played = await testing.play(env, task, computing)
        assert (played.reward, played.metrics) == (1.0, {"calls": 3.0}), task.prompt
        assert played.rollout.num_turns == 4
    task = some_tasks(env, 1)[0]
    endless = await testing.play(env, task, lambda asked: call("add", a=1, b=1))
    assert (endless.reward, endless.stop) == (0.0, "max_turns")
    wrong = await testing.play(
        env, task, lambda asked: asked.said if asked.results else call("multiply", a="x", b="1+1")
    )
    assert wrong.reward == 0.0
    assert "arguments of multiply: Expected `int`" in wrong.last_text


def sorting(asked: PolicyPrompt) -> str:
    lists = [one.content.partition(": ")[2] for one in asked.messages if one.role == "user"]
    return ", ".join(sorted(", ".join(lists).split(", ")))


async def test_alphabet_sort() -> None:
    env = load("alphabet-sort")
    for task in some_tasks(env):
        played = await testing.play(env, task, sorting)
        assert (played.reward, played.metrics) == (1.0, {"last_list_right": 1.0})
        assert played.rollout.num_turns == 3
        lazy = await testing.play(env, task, lambda asked: asked.said.partition(": ")[2])
        assert 0 < lazy.reward < 1
        assert lazy.metrics == {"last_list_right": 0.0}


def counting(asked: PolicyPrompt, off_by: int = 0) -> str:
    """Counts letters with an error, but judges without one, with the tool where it is told to."""
    letter, word = re.findall(r"many (\w) are in (\w+)", asked.first)[0]
    if "Say yes" not in asked.first:
        return str(word.count(letter) + off_by)
    if "Use the tool" in asked.first and not asked.results:
        return call("count", letter=letter, word=word)
    right = asked.results[0] if asked.results else str(word.count(letter))
    return "yes" if f"Is it {right}?" in asked.first else "no"


async def test_self_check() -> None:
    env = load("self-check")
    for task in some_tasks(env):
        played = await testing.play(env, task, counting)
        assert played.rewards == {"exact": 1.0, "checked": 1.0, "convincing": 1.0}
        assert (played.reward, played.metrics) == (1.75, {"lookups": 2.0})
        assert len(played.rows) == 3, "the answer and two checks, not the judge"
        assert played.rollout.num_turns == 5
        wrong = await testing.play(env, task, lambda asked: counting(asked, off_by=1))
        assert wrong.rewards == {"exact": 0.0, "checked": 1.0, "convincing": 0.0}
