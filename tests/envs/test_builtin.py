"""The built-in environments, played by policies that answer well and by policies that do not."""

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


def test_every_builtin_environment_is_registered_and_has_a_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {name: f"rollway.envs.builtin.{name.replace('-', '_')}" for name in NAMES}
    points = {name: f"{module}:load_environment" for name, module in modules.items()}
    assert project["entry-points"]["rollway.environments"] == points
    assert sorted(readme.parent.name for readme in BUILTIN.glob("*/README.md")) == sorted(
        name.replace("-", "_") for name in NAMES
    )
    for name in NAMES:
        readme = BUILTIN / name.replace("-", "_") / "README.md"
        assert readme.read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_the_order_and_evaluation_tasks_are_never_trained_on(
    name: str,
) -> None:
    first = some_tasks(load(name), 300)
    assert first == some_tasks(load(name), 300)
    assert first != some_tasks(load(name, seed=1), 300)
    held_out = list(load(name).eval_tasks())
    assert held_out == list(load(name, seed=1).eval_tasks()), (
        "runs with different seeds compare"
    )
    assert 64 <= len(held_out) <= 128
    assert len({task.prompt for task in held_out}) == len(held_out)
    assert not {task.prompt for task in held_out} & {task.prompt for task in first}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("alphabet-sort", {"num_batches": 30}),
        ("calculator", {"num_operations": 0}),
        ("guess-number", {"size": 1}),
        ("reverse-text", {"min_length": 4, "max_length": 3}),
        ("self-check", {"min_length": 0}),
    ],
)
def test_wrong_args_are_refused(name: str, args: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="need "):
        load(name, **args)


@pytest.mark.parametrize("name", NAMES)
async def test_a_policy_that_answers_nonsense_is_scored_too(name: str) -> None:
    env = load(name)
    for task in some_tasks(env, 2):
        for words in ("", "blah, blah", "<tool_call>what", "9" * 5000):
            played = await testing.play(
                env, task, lambda prompt, words=words: words, max_tokens=6000
            )
            assert 0 <= played.reward < 1


async def test_reverse_text() -> None:
    env = load("reverse-text")
    for task in some_tasks(env):
        played = await testing.play(
            env, task, lambda prompt: prompt.last_text.split()[-1][::-1]
        )
        assert (played.reward, played.metrics) == (1.0, {"letters_in_place": 1.0})


def halving(prompt: PolicyPrompt) -> str:
    """Guess the middle of the range that is left, as the hints so far say."""
    low, high = map(int, re.findall(r"\d+", prompt.first_text))
    for guess, hint in zip(prompt.messages[1::2], prompt.messages[2::2], strict=True):
        low, high = (
            (int(guess.content) + 1, high)
            if hint.content == "higher"
            else (low, int(guess.content) - 1)
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
    silent = await testing.play(env, some_tasks(env, 1)[0], lambda prompt: "?")
    assert (silent.reward, silent.stop) == (0.0, "max_turns")
    assert silent.metrics == {"guesses": 6.0, "unreadable": 6.0}


async def test_guess_number_found_with_the_last_guess() -> None:
    env = load("guess-number", max_guesses=2)
    task = some_tasks(env, 1)[0]
    played = await testing.play(
        env, task, lambda prompt: str(task.answer) if len(prompt.messages) > 1 else "?"
    )
    assert (played.reward, played.stop) == (0.5, "found")


TOOLS = {"+": "add", "-": "subtract", "*": "multiply"}


def computing(prompt: PolicyPrompt) -> str:
    """Call the tool for the innermost operation that has no result yet; say the last result."""
    left = re.findall(r"-?\d+|[-+*](?= )", prompt.first_text)
    for result in prompt.results:
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
    endless = await testing.play(env, task, lambda prompt: call("add", a=1, b=1))
    assert (endless.reward, endless.stop) == (0.0, "max_turns")
    wrong = await testing.play(
        env,
        task,
        lambda prompt: (
            prompt.last_text if prompt.results else call("multiply", a="x", b="1+1")
        ),
    )
    assert wrong.reward == 0.0
    assert "the arguments of multiply are wrong: Expected `int`" in wrong.last_text


def sorting(prompt: PolicyPrompt) -> str:
    lists = [
        message.content.partition(": ")[2]
        for message in prompt.messages
        if message.role == "user"
    ]
    return ", ".join(sorted(", ".join(lists).split(", ")))


async def test_alphabet_sort() -> None:
    env = load("alphabet-sort")
    for task in some_tasks(env):
        played = await testing.play(env, task, sorting)
        assert (played.reward, played.metrics) == (1.0, {"last_list_right": 1.0})
        assert played.rollout.num_turns == 3
        lazy = await testing.play(
            env, task, lambda prompt: prompt.last_text.partition(": ")[2]
        )
        assert 0 < lazy.reward < 1
        assert lazy.metrics == {"last_list_right": 0.0}


def counting(prompt: PolicyPrompt, off_by: int = 0) -> str:
    """Count letters, wrongly by `off_by`; judge rightly, with the tool where the prompt says so."""
    letter, word = re.findall(r"many (\w) are in (\w+)", prompt.first_text)[0]
    if "Say yes" not in prompt.first_text:
        return str(word.count(letter) + off_by)
    if "Use the tool" in prompt.first_text and not prompt.results:
        return call("count", letter=letter, word=word)
    right = prompt.results[0] if prompt.results else str(word.count(letter))
    return "yes" if f"Is it {right}?" in prompt.first_text else "no"


async def test_self_check() -> None:
    env = load("self-check")
    for task in some_tasks(env):
        played = await testing.play(env, task, counting)
        assert played.rewards == {"exact": 1.0, "checked": 1.0, "convincing": 1.0}
        assert (played.reward, played.metrics) == (1.75, {"lookups": 2.0})
        assert len(played.rows) == 3, "the answer and two checks, not the judge"
        assert played.rollout.num_turns == 5
        wrong = await testing.play(env, task, lambda prompt: counting(prompt, off_by=1))
        assert wrong.rewards == {"exact": 0.0, "checked": 1.0, "convincing": 0.0}
