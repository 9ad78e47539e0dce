"""Environments as authors write them, and how they are found."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rollway as rw
from rollway.envs.environment import check
from rollway.envs.in_lane import EnvSpec, score, take_tasks
from rollway.envs.rewards import scorers, total
from rollway.errors import EnvironmentNotFound

REVERSE = EnvSpec("reverse-text", b"{}", seed=3)
FILE = """
import rollway as rw

class Count(rw.Environment):
    def __init__(self, top=3):
        self.top = top

    def tasks(self):
        for n in range(self.top):
            yield rw.Task(id=str(n), prompt=f"{n}?", answer=str(n + 1))

    @rw.reward(weight=2)
    def right(self, task, rollout):
        return rollout.reply == task.answer

    @rw.metric
    def length(self, task, rollout):
        return len(rollout.reply)
"""


def ended(text: str) -> rw.Rollout:
    messages = (rw.Message("user", "?"), rw.Message("assistant", text))
    return rw.Rollout(messages=messages, num_turns=1, num_tokens=3, stop="stop", info={})


def test_tasks_come_in_the_same_order_for_the_same_seed() -> None:
    first = list(itertools.islice(REVERSE.build().tasks(), 50))
    assert first == list(itertools.islice(REVERSE.build().tasks(), 50))
    other = EnvSpec("reverse-text", b"{}", seed=4).build()
    assert first != list(itertools.islice(other.tasks(), 50))


def test_tasks_are_taken_by_position_from_anywhere() -> None:
    everything = take_tasks(REVERSE, 0, 30)
    assert take_tasks(REVERSE, 30, 5) == tuple(itertools.islice(REVERSE.build().tasks(), 30, 35))
    assert take_tasks(REVERSE, 10, 20) == everything[10:], "going back starts over"


def test_a_file_is_an_environment(tmp_path: Path) -> None:
    path = tmp_path / "count.py"
    path.write_text(FILE)
    spec = EnvSpec(str(path), msgspec.json.encode({"top": 2}), 0)
    assert [task.id for task in take_tasks(spec, 0, 10)] == ["0", "1"], "finite tasks end"
    task = take_tasks(spec, 1, 1)[0]
    scores = score(spec, task, ended("2"))
    assert scores == {"right": 1.0, "length": 1.0}
    assert total(type(spec.build()), scores) == 2.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("id=0, prompt='?'", "Expected `str`, got `int`"),
        ("id='0', prompt=None", "Expected `str`, got `None`"),
        ("id='0', prompt='?', answer=2**70", "task '0' cannot be sent"),
        ("id='0', prompt='?', answer=object()", "unsupported"),
    ],
)
def test_tasks_that_cannot_travel_are_named(tmp_path: Path, fields: str, said: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(FILE.replace('id=str(n), prompt=f"{n}?", answer=str(n + 1)', fields))
    with pytest.raises(TypeError, match=said):
        take_tasks(EnvSpec(str(path), b"{}", 0), 0, 1)


def test_reverse_text_scores() -> None:
    task = rw.Task(id="0", prompt="Reverse: abcd", answer="dcba")
    assert score(REVERSE, task, ended("dcba")) == {"exact": 1.0, "letters_in_place": 1.0}
    assert score(REVERSE, task, ended("dcxx")) == {"exact": 0.0, "letters_in_place": 0.5}


def test_unknown_environments_get_a_hint() -> None:
    with pytest.raises(
        EnvironmentNotFound, match=r"no environment 'revers-text'; did you mean 'reverse-text'\?"
    ):
        rw.load_environment("revers-text")
    with pytest.raises(EnvironmentNotFound, match="no environment file at"):
        rw.load_environment("nowhere/env.py")
    with pytest.raises(EnvironmentNotFound, match="does not take these args"):
        rw.load_environment("reverse-text", colour="red")


class NoReward(rw.Environment):
    def tasks(self) -> Any:
        return []


class NotAsync(NoReward):
    def user(self, task: Any, chat: Any) -> None:  # type: ignore[override]
        pass

    @rw.reward
    def one(self, task: Any, rollout: Any) -> float:
        return 1.0


class NoTasks(rw.Environment):
    @rw.reward
    def one(self, task: Any, rollout: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (NoReward(), "no method marked @rw.reward"),
        (NotAsync(), "must be 'async def'"),
        (NoTasks(), "no tasks"),
        (3, "gave a int"),
    ],
)
def test_environments_that_cannot_run_are_refused(env: Any, said: str) -> None:
    with pytest.raises(EnvironmentNotFound, match=said):
        check(env, "test")


def test_scorers_follow_inheritance() -> None:
    class Base(NoTasks):
        @rw.metric
        def two(self, task: Any, rollout: Any) -> float:
            return 2.0

    class Child(Base):
        def two(self, task: Any, rollout: Any) -> float:  # no longer marked
            return 2.0

        @rw.reward(weight=3)
        async def three(self, task: Any, rollout: Any) -> float:
            return 3.0

    assert [one.name for one in scorers(Base)] == ["one", "two"]
    assert [(one.name, one.weight, one.is_async) for one in scorers(Child)] == [
        ("one", 1.0, False),
        ("three", 3.0, True),
    ]
