"""Tasks and scores of environments, as a lane's process takes them from the author's code."""

import itertools
from pathlib import Path

import msgspec
import pytest

import rollway as rw
from rollway.envs.in_lane import EnvSpec, score, score_group, take_tasks
from rollway.envs.rewards import total

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
        return rollout.last_text == task.answer

    @rw.metric
    def length(self, task, rollout):
        return len(rollout.last_text)
"""
RETURNING = """
import rollway as rw

class Returning(rw.Environment):
    def tasks(self):
        return [rw.Task(id="0", prompt="?")]

    @rw.reward
    def grade(self, task, rollout):
        return {value}

    @rw.group_reward
    def rank(self, task, rollouts):
        return {values}
"""


def rollout(reply: str) -> rw.Rollout:
    messages = (rw.Message("user", "?"), rw.Message("assistant", reply))
    return rw.Rollout(messages=messages, num_turns=1, num_tokens=3, stop="stop", info={})


def returning(folder: Path, value: str = "1.0", values: str = "[1, 2]") -> EnvSpec:
    """An environment whose rewards return these Python expressions."""
    path = folder / "returning.py"
    path.write_text(RETURNING.format(value=value, values=values))
    return EnvSpec(str(path), b"{}", 0)


TASK = rw.Task("0", "?")


def test_tasks_come_in_the_same_order_for_the_same_seed() -> None:
    first = list(itertools.islice(REVERSE.build().tasks(), 50))
    assert first == list(itertools.islice(REVERSE.build().tasks(), 50))
    other = EnvSpec("reverse-text", b"{}", seed=4).build()
    assert first != list(itertools.islice(other.tasks(), 50))


def test_tasks_can_be_taken_from_any_position() -> None:
    everything = take_tasks(REVERSE, 0, 30)
    assert take_tasks(REVERSE, 30, 5) == tuple(
        itertools.islice(REVERSE.build().tasks(), 30, 35)
    )
    assert take_tasks(REVERSE, 10, 20) == everything[10:], "going back starts over"


def test_a_file_is_an_environment(tmp_path: Path) -> None:
    path = tmp_path / "count.py"
    path.write_text(FILE)
    spec = EnvSpec(str(path), msgspec.json.encode({"top": 2}), 0)
    assert [task.id for task in take_tasks(spec, 0, 10)] == ["0", "1"], "finite tasks end"
    task = take_tasks(spec, 1, 1)[0]
    scores = score(spec, task, rollout("2"))
    assert scores == {"right": 1.0, "length": 1.0}
    assert total(type(spec.build()), scores) == 2.0


def test_tasks_that_raised_are_not_taken_for_ended(tmp_path: Path) -> None:
    path = tmp_path / "raises.py"
    path.write_text(FILE.replace("for n in", "raise OSError('no network')\n        for n in"))
    for _ in range(2):
        with pytest.raises(OSError, match="no network"):
            take_tasks(EnvSpec(str(path), b"{}", 0), 0, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("id=0, prompt='?'", "Expected `str`, got `int`"),
        ("id='0', prompt=None", "Expected `str`, got `None`"),
        ("id='0', prompt='?', answer=2**70", "task '0' cannot be sent"),
        ("id='0', prompt='?', answer=object()", "unsupported"),
    ],
)
def test_a_task_that_cannot_be_sent_is_named(
    tmp_path: Path, fields: str, message: str
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(FILE.replace('id=str(n), prompt=f"{n}?", answer=str(n + 1)', fields))
    with pytest.raises(TypeError, match=message):
        take_tasks(EnvSpec(str(path), b"{}", 0), 0, 1)


def test_reverse_text_scores() -> None:
    task = rw.Task(id="0", prompt="Reverse: abcd", answer="dcba")
    assert score(REVERSE, task, rollout("dcba")) == {"exact": 1.0, "letters_in_place": 1.0}
    assert score(REVERSE, task, rollout("dcxx")) == {"exact": 0.0, "letters_in_place": 0.5}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("'1.0'", "grade returned '1.0', not a number"),
        ("b'1'", "grade returned b'1', not a number"),
        ("None", "grade returned None, not a number"),
        ("[1.0]", r"grade returned \[1.0\], not a number"),
        ("float('nan')", "grade returned nan, not a finite number"),
        ("float('-inf')", "grade returned -inf, not a finite number"),
    ],
)
def test_a_reward_that_is_not_a_finite_number_is_refused(
    tmp_path: Path, value: str, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        score(returning(tmp_path, value=value), TASK, rollout("x"))


@pytest.mark.parametrize("value", ["True", "1", "__import__('decimal').Decimal(1)"])
def test_a_reward_may_be_any_kind_of_number(tmp_path: Path, value: str) -> None:
    assert score(returning(tmp_path, value=value), TASK, rollout("x")) == {"grade": 1.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("[1.0]", "rank returned 1 rewards for 2 rollouts"),
        ("2.0", "rank returned a float, not a list of numbers"),
        ("'12'", "rank returned a str, not a list of numbers"),
        ("[1, '2']", "rank returned '2' for rollout 1, not a number"),
        ("[float('nan'), 1]", "rank returned nan for rollout 0, not a finite number"),
    ],
)
def test_a_group_reward_is_one_number_for_each_rollout(
    tmp_path: Path, values: str, message: str
) -> None:
    group = (rollout("a"), rollout("b"))
    assert score_group(returning(tmp_path), TASK, group) == {"rank": [1.0, 2.0]}
    (tmp_path / "bad").mkdir()
    with pytest.raises((TypeError, ValueError), match=message):
        score_group(returning(tmp_path / "bad", values=values), TASK, group)
