"""What a worker writes into its log, and tells of its rollouts."""

import logging

import pytest

from rollway.envserver.failures import IN_FULL, FailureLog
from rollway.envserver.worker.track import MAX_TOLD, Track, progress
from rollway.envserver.worker.worker_log import WINDOWS, WorkerLog
from rollway.loop.watch.lag import summarise
from rollway.records.ids import RolloutId, WorkerName
from rollway.records.lag import ProcessStats
from rollway.records.rollout import Failed


def test_one_line_for_ten_windows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pulse = WorkerLog(WorkerName("some.env.w3.7"))
    for second in range(2 * WINDOWS):
        lag = summarise([0.0001] * 98 + [0.001, 0.008 if second == 4 else 0.001])
        pulse.beat(ProcessStats("some.env.w3", lag, 312_000_000, in_flight=41))
    first, second = (record.message for record in caplog.records)
    assert first.startswith("W3 | 41 active | Lag: med=0.1ms p90=0.1ms p99=1.0ms max=8.0ms | RSS 312MB")
    assert "max=1.0ms" in second, "each window counts once"


def test_failures_are_told_in_full_then_ever_fewer(caplog: pytest.LogCaptureFixture) -> None:
    failures, id = FailureLog(), RolloutId("g1.2#9")
    for _ in range(200):
        failures.add(id, Failed("env", "KeyError('x')", 'File "env.py", line 3'), "task '17'")
    failures.add(id, Failed("scorer", "nan"), "task '17'")
    said = [record.message for record in caplog.records]
    for part in ("g1.2#9", "boundary env", "task '17'", "KeyError", "line 3"):
        assert part in said[0]
    assert IN_FULL < len(said) < IN_FULL + 10
    assert "boundary scorer (number 1)" in said[-1]


def test_progress_tells_of_those_longest_in_their_phase() -> None:
    tracks = [(RolloutId(str(n)), Track()) for n in range(MAX_TOLD + 50)]
    for n, (_, track) in enumerate(tracks):
        track.since_s -= n
    tracks[-1][1].turned(5)
    tracks[0][1].enter("scoring")
    told = progress(tracks)
    assert len(told) == MAX_TOLD
    assert told[0].rollout_id == str(MAX_TOLD + 49)
    assert (told[0].phase, told[0].num_turns, told[0].num_tokens) == ("starting", 1, 5)
    assert told[0].since_s > told[1].since_s > told[-1].since_s
