"""How failures are logged."""

import pytest

from rollway.envserver.failures import IN_FULL, FailureLog
from rollway.records.ids import RolloutId
from rollway.records.rollout import Failed


def test_the_first_failures_are_all_logged_and_later_ones_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures, rollout_id = FailureLog(), RolloutId("g1.2#9")
    for _ in range(200):
        failures.add(
            rollout_id, Failed("env", "KeyError('x')", 'File "env.py", line 3'), "task '17'"
        )
    failures.add(rollout_id, Failed("scorer", "nan"), "task '17'")
    lines = [record.message for record in caplog.records]
    for part in ("g1.2#9", "boundary env", "task '17'", "KeyError", "line 3"):
        assert part in lines[0]
    assert IN_FULL < len(lines) < IN_FULL + 10
    assert "boundary scorer (number 1)" in lines[-1]
