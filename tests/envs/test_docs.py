"""Every environment in the guide for authors and in the README runs as it stands."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from tests.doubles.chat import chat_double

import rollway as rw
from rollway import testing
from rollway.envs.environment import needs_whole_groups
from rollway.loop.lanes.user_files import import_file
from rollway.testing import Answer, PolicyPrompt, call

GUIDE = Path(__file__).parents[2] / "docs" / "environments.md"
README = Path(__file__).parents[2] / "README.md"
BLOCKS = [
    block for page in (GUIDE, README)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]  # fmt: skip


def remembers(prompt: PolicyPrompt) -> str:
    calls = [call("write", line="blue"), call("read", number=1), "blue"]
    return calls[len(prompt.results)]


def reviews(prompt: PolicyPrompt) -> str:
    if "Look it up" not in prompt.first_text:
        return "a tree"
    return "yes" if prompt.last_text == "a tree" else call("look_up", word="oak")


POLICIES: dict[str, tuple[Answer, float]] = {
    "SortLetters": (
        lambda prompt: "".join(sorted(prompt.last_text.removeprefix("Sort: "))),
        1.0,
    ),
    "Questions": (lambda prompt: "Paris", 1.0),
    "Patient": (lambda prompt: "1" if "Look again" in prompt.last_text else "?", 0.5),
    "CountUp": (lambda prompt: str(len(prompt.messages)), 1.0),
    "Remember": (remembers, 1.0),
    "Waiter": (
        lambda prompt: "Which flavour?" if "ice" in prompt.last_text else "Here.",
        1.0,
    ),
    "Reviewed": (reviews, 1.5),
    "Haiku": (lambda prompt: "a\nb\nc", 1.2),
    "Judged": (
        lambda prompt: "Yes." if "right?" in prompt.last_text else "Air scatters it.",
        1.0,
    ),
    "Graded": (lambda prompt: "Air scatters it.", 0.75),
    "OldCode": (lambda prompt: "6", 0.5),
    "Sum": (lambda prompt: "5", 1.0),
}
"""For each environment of the guide a policy that answers by its prompt, and the reward it earns."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    line = json.dumps({"prompt": "The capital of France?", "answer": "Paris"})
    (tmp_path / "train.jsonl").write_text(line)
    (tmp_path / "test.jsonl").write_text(line)
    return tmp_path


def name_of(block: str) -> str:
    return re.findall(r"class (\w+)\(rw.Environment\)", block)[0]


async def played_beside_a_judge(
    env: rw.Environment, task: rw.Task, answer: Answer
) -> testing.Played:
    """Play beside a chat endpoint, for the environment that asks one."""
    if not hasattr(env, "judge"):
        return await testing.play(env, task, answer)
    async with chat_double(
        lambda said, before: "Short, but right: 0.75", models=("my-judge",)
    ) as double:
        env.judge = rw.Judge(double.url, "my-judge")
        return await testing.play(env, task, answer)


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_every_block_is_an_environment_that_can_be_played(block: str, folder: Path) -> None:
    path = folder / f"{name_of(block).lower()}.py"
    path.write_text(block)
    env = rw.load_environment(str(path))
    answer, reward = POLICIES[name_of(block)]
    task = next(iter(env.tasks()))
    played = asyncio.run(played_beside_a_judge(env, task, answer))
    assert played.reward == reward
    assert next(iter(env.eval_tasks())).id == task.id
    tests = [
        function
        for name, function in vars(import_file(path)).items()
        if name.startswith("test_")
    ]
    for test in tests:
        test()
    assert len(tests) == block.count("\ndef test_")
    assert needs_whole_groups(env) == ("group_reward" in block)


def test_the_readme_begins_with_the_same_environment() -> None:
    assert name_of(BLOCKS[-1]) == name_of(BLOCKS[0])
    assert len(BLOCKS[-1].strip().splitlines()) <= 20
