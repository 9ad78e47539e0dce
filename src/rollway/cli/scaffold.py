"""The files of a new environment package, in which `$name`, `$module` and `$title` are filled in."""

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
description = "An environment for rollway."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["rollway"]

[project.optional-dependencies]
dev = ["pytest>=8"]

[project.entry-points."rollway.environments"]
$name = "$module:load_environment"

[tool.setuptools]
py-modules = ["$module"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

MODULE = '''\
"""$name: sort the letters of a word."""

import itertools
import random
import zlib
from collections.abc import Iterator

import rollway as rw

LETTERS = "abcdefgh"


class $title(rw.Environment):
    """Words of up to `max_length` letters."""

    def __init__(self, max_length: int = 5) -> None:
        self.max_length = max_length

    def tasks(self) -> Iterator[rw.Task]:
        """Return endless tasks, in the same order for the same seed."""
        return (task for task in self.draw(self.seed) if not is_held_out(task))

    def eval_tasks(self) -> Iterator[rw.Task]:
        """Return a hundred tasks that are never trained on, the same ones for every run."""
        return itertools.islice((task for task in self.draw(0) if is_held_out(task)), 100)

    def draw(self, seed: int) -> Iterator[rw.Task]:
        rng = random.Random(seed)
        for index in itertools.count():
            word = "".join(rng.choices(LETTERS, k=rng.randint(2, self.max_length)))
            yield rw.Task(id=str(index), prompt=f"Sort: {word}", answer="".join(sorted(word)))

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        """Say the prompt. Every turn is recorded, and rewards can read what you note in chat.info."""
        await chat.say(task.prompt)

    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.last_text.strip() == task.answer)

    @rw.metric
    def length(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(len(rollout.last_text))


def is_held_out(task: rw.Task) -> bool:
    """Keep one word in eight for evaluation, whatever the seed."""
    return zlib.crc32(task.prompt.encode()) % 8 == 0


def load_environment(max_length: int = 5) -> $title:
    """Build the environment; `args` of the run file are the arguments."""
    return $title(max_length)
'''

TEST = '''\
"""Tests with a scripted policy, which answers by its prompt: see rollway.testing."""

import asyncio
import itertools

import pytest
from rollway import testing

from $module import load_environment


def sorts(prompt: testing.PolicyPrompt) -> str:
    return "".join(sorted(prompt.last_text.removeprefix("Sort: ")))


def test_the_right_answer_is_rewarded() -> None:
    env = load_environment()
    task = next(iter(env.tasks()))
    played = asyncio.run(testing.play(env, task, sorts))
    assert played.reward == 1.0
    assert played.metrics == {"length": len(task.answer)}


@pytest.mark.parametrize("reply", ["", "z", "a b c"])
def test_a_wrong_answer_is_not_rewarded(reply: str) -> None:
    env = load_environment()
    played = asyncio.run(testing.play(env, next(iter(env.tasks())), lambda prompt: reply))
    assert played.reward == 0.0


def test_tasks_come_in_the_same_order_for_the_same_seed() -> None:
    first = list(itertools.islice(load_environment().tasks(), 20))
    assert first == list(itertools.islice(load_environment().tasks(), 20))


def test_evaluation_tasks_are_finite_and_never_trained_on() -> None:
    evaluated = {task.prompt for task in load_environment().eval_tasks()}
    trained = {task.prompt for task in itertools.islice(load_environment().tasks(), 1000)}
    assert evaluated
    assert not evaluated & trained
'''

RUN = """\
# A tiny Mixture-of-Experts model learns this on a laptop's CPU. To train your model, set model.path to
# its folder, remove [warmup], and choose the renderer of its family.
name = "$name"
max_steps = 50

[model]
path = "outputs/models/$name"
renderer = "qwen3"
template = { enable_thinking = false }

[warmup]
solve_rate = 0.1

[[env]]
id = "$name"

[sampling]
max_tokens = 12

[engine]
max_context = 128

[orchestrator]
batch_size = 64
group_size = 8

[trainer]
lr = 1e-3
micro_batch_tokens = 512
"""

README = """\
# $name

Sort the letters of a word: `Sort: bca` → `abc`. Replace this with your task.

```bash
pip install -e '.[dev]'          # makes '$name' known to rollway
pytest                           # runs the tests; the policy is a script, so no model is needed
rollway envs                     # lists '$name'
rollway eval $name -m MODEL --engine-url http://localhost:8000/v1 -n 50 -r 4
rollway train run.toml           # trains a tiny model on it; needs rollway[local]
```

Without installing it, name the file: `--set env.0.id=$module.py`.

| arg | default | meaning |
|---|---|---|
| `max_length` | 5 | letters of the longest word |

| | |
|---|---|
| reward `exact` | 1 if the reply is the sorted word, else 0 |
| metric `length` | characters of the reply |
"""
