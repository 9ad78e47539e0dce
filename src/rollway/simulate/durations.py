"""Durations of simulated work: drawn around a mean, or as measured in a past run."""

import math
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from statistics import fmean

import msgspec
from msgspec import Struct

from ..errors import RunDirError
from ..records.rollout import Scored, Settled
from ..rundir.metrics_file import MetricsFile
from ..rundir.rundir import RunDir

Seconds = Sequence[float]
GROUP_SIZE = 16
"""Rollouts of a drawn group. A smaller group uses some of them, a larger one those of several groups."""


class SampledRollout(Struct, frozen=True):
    """A rollout to draw: how long it takes in a worker, and its reward."""

    seconds: float
    reward: float


class Durations(Struct, frozen=True):
    """The samples that simulated rollouts and steps are drawn from."""

    groups: Sequence[Sequence[SampledRollout]]
    """Rollouts are drawn by whole groups, because those of a group are alike. They ran at the same load,
    so the slowest of them is not as slow as the slowest of independent draws. And a group whose rewards
    are all equal is not trained on."""
    train_s: Seconds
    """From the written manifest until the version that it makes is published."""
    update_s: Seconds
    ship_s: Seconds
    num_bytes: Sequence[int]
    num_tokens: Sequence[int]
    fails: float


class MeanDurations(Struct, frozen=True, kw_only=True):
    """Mean durations of a run, for `rollway simulate` without a past run to take them from."""

    turns: float = 1.0
    """Turns of a rollout."""
    turn_s: float = 5.0
    """Seconds the engine takes for one turn."""
    tool_s: float = 0.0
    """Seconds the environment takes between two turns."""
    scoring_s: float = 0.1
    """Seconds the rewards take."""
    train_s: float = 30.0
    """Seconds from a batch being shipped to its weights being published."""
    update_s: float = 2.0
    """Seconds the engine takes to load weights."""
    spread: float = 0.5
    """How much all durations vary: the standard deviation of their logarithm."""
    rollout_bytes: int = 1_000_000
    """Payload of a rollout."""
    rollout_tokens: int = 1000
    """Tokens of a rollout, prompts included."""
    failure_rate: float = 0.0
    """Share of the rollouts that fail."""


def around_means(means: MeanDurations, seed: int, count: int = 2000) -> Durations:
    """Draw turns, tools, scoring and training around their means."""
    rng = random.Random(seed)

    def around(mean: float) -> float:
        """Draw from a log-normal distribution: never negative, with a long tail."""
        if not mean:
            return 0.0
        sigma = means.spread
        return mean * math.exp(rng.gauss(0, sigma) - sigma * sigma / 2)

    def rollout() -> float:
        num_turns = max(1, round(around(means.turns)))
        turns_s = sum(around(means.turn_s) + around(means.tool_s) for _ in range(num_turns))
        return turns_s + around(means.scoring_s)

    def group() -> list[SampledRollout]:
        return [SampledRollout(rollout(), float(rng.random() < 0.5)) for _ in range(GROUP_SIZE)]

    return Durations(
        groups=[group() for _ in range(count // GROUP_SIZE)],
        train_s=[around(means.train_s) for _ in range(count)],
        update_s=[around(means.update_s) for _ in range(count)],
        ship_s=[0.01],
        num_bytes=[means.rollout_bytes],
        num_tokens=[means.rollout_tokens],
        fails=means.failure_rate,
    )


class _MetricsLine(Struct):
    step_time: float = msgspec.field(name="time/step", default=0.0)
    train: float = msgspec.field(name="time/train", default=0.0)
    publish: float = msgspec.field(name="time/publish", default=0.0)
    open: float = msgspec.field(name="time/open", default=0.0)
    ship: float = msgspec.field(name="time/ship", default=0.0)
    update: float = msgspec.field(name="time/update_weights", default=0.0)


def from_run(run: RunDir) -> Durations:
    """Take durations as measured in a past run, without the first tenth of its steps, the warm-up."""
    lines = _metrics(run)
    steady = lines[len(lines) // 10 :]
    ends = _ends(run)
    scored = [end.outcome for _, end in ends if isinstance(end.outcome, Scored)]
    if not scored or not steady:
        raise RunDirError(f"{run.path} has no trained steps to take durations from")
    return Durations(
        groups=_groups(ends),
        train_s=[line.open + line.train + line.publish for line in steady],
        update_s=[line.update for line in steady if line.update] or [0.0],
        ship_s=[line.ship for line in steady],
        num_bytes=[rollout.ref.length for rollout in scored],
        num_tokens=[rollout.num_tokens for rollout in scored],
        fails=1 - len(scored) / len(ends),
    )


def measured_step_s(run: RunDir) -> float:
    """Return the mean time of a step in a past run, without its warm-up."""
    lines = _metrics(run)
    return fmean(line.step_time for line in lines[len(lines) // 10 :])


def _metrics(run: RunDir) -> list[_MetricsLine]:
    if not run.metrics.exists():
        raise RunDirError(f"{run.path} is not a run that trained: it has no {run.metrics.name}")
    lines = MetricsFile(run.metrics).lines()
    return [msgspec.json.decode(line, type=_MetricsLine) for _, _, line in lines]


def _groups(ends: list[tuple[int, Settled]]) -> list[list[SampledRollout]]:
    """Return the scored rollouts, by group."""
    groups: dict[int, list[SampledRollout]] = {}
    for group_id, end in ends:
        if isinstance(end.outcome, Scored):
            sampled = SampledRollout(end.outcome.timing.total_s, end.outcome.reward)
            groups.setdefault(group_id, []).append(sampled)
    return list(groups.values())


def _ends(run: RunDir) -> list[tuple[int, Settled]]:
    """Return the scored and failed rollouts of training, with the id of their group."""
    with closing(sqlite3.connect(f"file:{run.ledger}?mode=ro", uri=True)) as db:
        rows = db.execute(
            "SELECT group_id, record FROM rollouts JOIN groups USING (group_id) "
            "WHERE outcome IN ('scored', 'failed') AND fate IS NOT 'eval' ORDER BY rollout_id"
        )
        return [(group_id, msgspec.msgpack.decode(record, type=Settled)) for group_id, record in rows]
