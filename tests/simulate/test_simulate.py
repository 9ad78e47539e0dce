"""Simulated runs keep the bounds of real ones, and take as long as their durations say."""

import random
import re
from pathlib import Path
from statistics import fmean

import pytest
from tests.orchestrator.builders import core_spec
from typer.testing import CliRunner

from rollway.cli.main import make_app
from rollway.orchestrator.core.core import Core
from rollway.records.ids import Step
from rollway.simulate.durations import Durations, MeanDurations, SampledRollout, around_means
from rollway.simulate.world import SimulatedWorld, SimulationTally


def simulated(off_policy: int, durations: Durations, slots: int = 64) -> SimulationTally:
    spec = core_spec(
        batch_size=32,
        max_in_flight=64,
        max_outstanding=32 * (1 + off_policy),
        max_off_policy_steps=off_policy,
        max_useless_groups=500,
        max_steps=200,
        micro_batch_tokens=4096,
        ratios={"a": 3.0, "b": 1.0},
    )
    return SimulatedWorld(Core(spec, Step(1), {}), durations, slots, seed=1).run(100_000)


def fixed(rollout_s: float, train_s: float, fails: float = 0.0) -> Durations:
    rewards = [[0.0] * 4, *[[0.0, 1.0, 0.0, 1.0]] * 7]
    groups = [[SampledRollout(rollout_s, reward) for reward in group] for group in rewards]
    return Durations(groups, [train_s], [0.0], [0.0], [100], [10], fails)


def test_a_synchronous_run_takes_the_sum_of_its_parts() -> None:
    """Some groups have equal rewards and are not trained on, so some steps wait for more rollouts."""
    tally = simulated(0, fixed(2.0, 3.0))
    assert len(tally.steps_s) == 200
    assert set(tally.staleness) == {0}
    assert all((step - 3.0) % 2.0 == pytest.approx(0) for step in tally.steps_s)
    assert tally.training_s == pytest.approx(600.0)


def test_two_simulations_in_one_process_do_not_share_counts() -> None:
    asynchronous, synchronous = simulated(2, fixed(2.0, 3.0)), simulated(0, fixed(2.0, 3.0))
    assert max(asynchronous.staleness) > 0
    assert set(synchronous.staleness) == {0}
    assert sum(synchronous.waits_us.values()) == pytest.approx(
        synchronous.now_s * 1e6, rel=1e-3
    )


@pytest.mark.parametrize("off_policy", [1, 2])
def test_off_policy_runs_overlap_and_stay_within_their_bound(off_policy: int) -> None:
    tally = simulated(off_policy, fixed(2.0, 3.0))
    assert max(tally.staleness) <= off_policy
    assert sum(tally.steps_s) < 200 * 4.5
    assert tally.most_in_flight <= 64


def test_fewer_slots_make_longer_steps() -> None:
    durations = around_means(MeanDurations(turns=3, turn_s=1, tool_s=0.5, train_s=1), seed=0)
    few, many = simulated(1, durations, slots=8), simulated(1, durations, slots=64)
    assert sum(few.steps_s) > 2 * sum(many.steps_s)


def test_durations_are_drawn_around_their_means() -> None:
    means = MeanDurations(turns=4, turn_s=2, tool_s=1, scoring_s=0.5, train_s=20)
    durations = around_means(means, seed=random.Random(0).randrange(100))
    mean = fmean(rollout.seconds for group in durations.groups for rollout in group)
    assert mean == pytest.approx(4 * 3 + 0.5, rel=0.1)
    assert sum(durations.train_s) / len(durations.train_s) == pytest.approx(20, rel=0.05)


def test_a_run_survives_failed_rollouts() -> None:
    tally = simulated(1, fixed(1.0, 1.0, fails=0.3))
    assert len(tally.steps_s) == 200
    assert not tally.gave_up


def test_the_command_says_what_limits_the_run(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "reverse-text" / "run.toml"
    result = CliRunner().invoke(make_app(), ["simulate", str(example), "--rollouts", "3000"])
    assert result.exit_code == 0, result.output
    for word in (
        "step  ",
        "engine idle",
        "trainer idle",
        "staleness",
        "payload",
        "limited by",
        "wait for",
    ):
        assert word in result.output
    (tmp_path / "config.toml").write_text("")
    bad = CliRunner().invoke(make_app(), ["simulate", str(example), "--from", str(tmp_path)])
    assert "has no metrics.jsonl" in str(bad.exception)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (["--train-s", "60"], "the trainer, which trains"),
        (
            ["--train-s", "0.01", "--set", "engine.embedded.max_batch=8"],
            "engine.embedded.max_batch: ",
        ),
        (
            ["--train-s", "0.01", "--set", "orchestrator.max_in_flight=16"],
            "orchestrator.max_in_flight, ",
        ),
    ],
)
def test_the_report_names_what_limits_the_simulated_run(
    options: list[str], limit: str
) -> None:
    example = Path(__file__).parents[2] / "examples" / "reverse-text" / "run.toml"
    said = CliRunner().invoke(
        make_app(), ["simulate", str(example), "--rollouts", "3000", *options]
    )
    lines = dict(
        re.split(r" {2,}", line, maxsplit=1)
        for line in said.output.splitlines()
        if "  " in line
    )
    assert lines["limited by"].startswith(limit), said.output
    idle = int(lines["trainer idle"].rstrip("%"))
    waits = dict(re.findall(r"([a-z ]+?) (\d+)%", lines["steps wait for"]))
    assert abs(int(waits.get("the trainer", "0")) - (100 - idle)) <= 1, (
        "they do not contradict"
    )
