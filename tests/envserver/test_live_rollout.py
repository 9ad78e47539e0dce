"""The state of one running rollout: turns, limits, phases, progress."""

from typing import Any

import pytest

import rollway as rw
from rollway.envserver.worker.live_rollout import (
    LEAST_GROWTH,
    MAX_REPORTED,
    LiveRollout,
    progress,
)
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.turn import Sampling
from rollway.wire.messages import Run


def live(rollout_id: str = "r") -> LiveRollout:
    task = rw.Task(id="0", prompt="?")
    return LiveRollout(Run(RolloutId(rollout_id), 1, task, Sampling(8), PolicyVersion(0), 0))


def test_turns_tokens_and_engine_time_are_counted() -> None:
    rollout = live()
    assert (rollout.num_turns, rollout.stop) == (0, "no turn")
    rollout.count(rw.Reply("a", "stop", 3), engine_s=0.5)
    rollout.count(rw.Reply("b", "length", 4), engine_s=0.25)
    assert (rollout.num_turns, rollout.num_tokens, rollout.engine_s) == (2, 7, 0.75)
    assert rollout.stop == "length"
    rollout.stopped_by = "max_turns"
    rollout.count(rw.Reply("an update's turn", "stop", 1), engine_s=0.0)
    assert rollout.stop == "max_turns", "what ended the rollout says more than its last turn"


class Unlimited(rw.Environment):
    pass


class TwoTurns(rw.Environment):
    max_turns = 2


class SevenTokens(rw.Environment):
    max_rollout_tokens = 7


@pytest.mark.parametrize(
    ("env", "expected"),
    [(Unlimited(), ["", "", ""]), (TwoTurns(), ["", "max_turns", "max_turns"]),
     (SevenTokens(), ["", "", "max_rollout_tokens"])],
    ids=lambda value: type(value).__name__ if isinstance(value, rw.Environment) else None,
)  # fmt: skip
def test_a_limit_is_reached_by_the_turn_that_exhausts_it(
    env: Any, expected: list[str]
) -> None:
    rollout = live()
    assert rollout.limit_reached(env) == ""
    for limit in expected:
        rollout.count(rw.Reply("a", "stop", 3), engine_s=0.0)
        assert rollout.limit_reached(env) == limit


def test_a_phase_ends_with_its_block() -> None:
    rollout = live()
    rollout.enter("scoring")
    with rollout.within("tool"):
        assert rollout.phase == "tool"
    assert rollout.phase == "scoring"


def test_progress_reports_the_rollouts_that_are_longest_in_their_phase() -> None:
    rollouts = [live(str(n)) for n in range(MAX_REPORTED + 50)]
    for n, rollout in enumerate(rollouts):
        rollout.since_s -= n
    rollouts[-1].count(rw.Reply("a", "stop", 5), engine_s=0.0)
    rollouts[0].enter("scoring")
    reported = progress(rollouts)
    assert len(reported) == MAX_REPORTED
    assert reported[0].rollout_id == str(MAX_REPORTED + 49)
    assert (reported[0].phase, reported[0].num_turns, reported[0].num_tokens) == (
        "starting",
        1,
        5,
    )
    assert reported[0].since_s > reported[1].since_s > reported[-1].since_s


def test_progress_reports_all_rollouts_whose_routes_have_grown() -> None:
    rollouts = [live(str(n)) for n in range(2 * MAX_REPORTED)]
    for rollout in rollouts:
        rollout.trace.num_loose_bytes = LEAST_GROWTH
    told: dict[str, int] = {}
    for _ in range(2):
        told |= {report.rollout_id: report.num_bytes for report in progress(rollouts)}
    assert sum(told.values()) == len(rollouts) * LEAST_GROWTH
    assert len(progress(rollouts)) == MAX_REPORTED, "those that are longest in their phase"
