"""The phases of a step are measured also when the work in them fails."""

import pytest

from rollway.orchestrator.shell.step_log import StepPhases
from rollway.records.ids import Step


def test_a_failed_advantage_does_not_count_as_still_running() -> None:
    phases = StepPhases()
    with pytest.raises(ZeroDivisionError), phases.crediting():
        raise ZeroDivisionError
    with phases.shipping(Step(1)):
        pass
    first = phases.take(Step(1))["time/credit"]
    with phases.shipping(Step(2)):
        pass
    assert first > 0.0
    assert phases.take(Step(2))["time/credit"] == 0.0, "nothing was credited in step 2"


def test_overlapping_advantages_count_once() -> None:
    phases = StepPhases()
    with phases.crediting():
        with phases.crediting():
            pass
        with phases.shipping(Step(1)):
            pass
    times = phases.take(Step(1))
    assert 0.0 < times["time/credit"] <= times["time/wait_rollouts"] + times["time/hold"]


def test_a_failed_ship_and_a_failed_update_are_measured() -> None:
    phases = StepPhases()
    with pytest.raises(ZeroDivisionError), phases.shipping(Step(1)):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), phases.updating():
        raise ZeroDivisionError
    assert {"time/ship", "time/update_weights"} <= phases.take(Step(1)).keys()
