"""How long things take: drawn around a mean, or as they were in a past run."""

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
GROUP = 16
"""Rollouts of a made group: a smaller one takes the first of them, a larger one those of several."""


class SampledRollout(Struct, frozen=True):
    """One rollout: seconds from its start in a worker to its end, and its reward."""

    seconds: float
    reward: float


class Durations(Struct, frozen=True):
    """What a simulated rollout and step are drawn from: measured samples, or made ones."""

    groups: Sequence[Sequence[SampledRollout]]
    """Rollouts of one group are alike: they run beside each other at one load, so that the slowest of
    them is not as slow as one of so many drawn freely, and a group of equal rewards does not train."""
    train_s: Seconds
    """From a manifest being written to the version it makes being published."""
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
    """Turns, tools and scoring around their means, with the spread the config gives."""
    rng = random.Random(seed)

    def around(mean: float) -> float:
        """Log-normal: never negative, with a tail."""
        if not mean:
            return 0.0
        sigma = means.spread
        return mean * math.exp(rng.gauss(0, sigma) - sigma * sigma / 2)

    def rollout() -> float:
        turns = max(1, round(around(means.turns)))
        return sum(around(means.turn_s) + around(means.tool_s) for _ in range(turns)) + around(
            means.scoring_s
        )

    def group() -> list[SampledRollout]:
        return [SampledRollout(rollout(), float(rng.random() < 0.5)) for _ in range(GROUP)]

    return Durations(
        groups=[group() for _ in range(count // GROUP)],
        train_s=[around(means.train_s) for _ in range(count)],
        update_s=[around(means.update_s) for _ in range(count)],
        ship_s=[0.01],
        num_bytes=[means.rollout_bytes],
        num_tokens=[means.rollout_tokens],
        fails=means.failure_rate,
    )


class _Line(Struct):
    step_time: float = msgspec.field(name="time/step", default=0.0)
    train: float = msgspec.field(name="time/train", default=0.0)
    publish: float = msgspec.field(name="time/publish", default=0.0)
    open: float = msgspec.field(name="time/open", default=0.0)
    ship: float = msgspec.field(name="time/ship", default=0.0)
    update: float = msgspec.field(name="time/update_weights", default=0.0)


def from_run(run: RunDir) -> Durations:
    """As they were measured; the first tenth of the steps, when everything warms up, is left out."""
    lines = _metrics(run)
    steady = lines[len(lines) // 10 :]
    ends = _ends(run)
    scored = [end.outcome for _, end in ends if isinstance(end.outcome, Scored)]
    if not scored or not steady:
        raise RunDirError(f"{run.path} has no trained steps to measure")
    return Durations(
        groups=_groups(ends),
        train_s=[line.open + line.train + line.publish for line in steady],
        update_s=[line.update for line in steady if line.update] or [0.0],
        ship_s=[line.ship for line in steady],
        num_bytes=[one.ref.length for one in scored],
        num_tokens=[one.num_tokens for one in scored],
        fails=1 - len(scored) / len(ends),
    )


def measured_step_s(run: RunDir) -> float:
    """The mean step of a past run, its warm-up left out."""
    lines = _metrics(run)
    return fmean(line.step_time for line in lines[len(lines) // 10 :])


def _metrics(run: RunDir) -> list[_Line]:
    if not run.metrics.exists():
        raise RunDirError(f"{run.path} is not a run that trained: it has no {run.metrics.name}")
    lines = MetricsFile(run.metrics).lines()
    return [msgspec.json.decode(line, type=_Line) for _, _, line in lines]


def _groups(ends: list[tuple[int, Settled]]) -> list[list[SampledRollout]]:
    """By group, those that were scored."""
    groups: dict[int, list[SampledRollout]] = {}
    for id, end in ends:
        if isinstance(end.outcome, Scored):
            rolled = SampledRollout(end.outcome.timing.total_s, end.outcome.reward)
            groups.setdefault(id, []).append(rolled)
    return list(groups.values())


def _ends(run: RunDir) -> list[tuple[int, Settled]]:
    """Rollouts of training, with their groups."""
    with closing(sqlite3.connect(f"file:{run.ledger}?mode=ro", uri=True)) as db:
        rows = db.execute(
            "SELECT group_id, record FROM rollouts JOIN groups USING (group_id) "
            "WHERE outcome IN ('scored', 'failed') AND fate IS NOT 'eval' ORDER BY rollout_id"
        )
        return [(id, msgspec.msgpack.decode(record, type=Settled)) for id, record in rows]
