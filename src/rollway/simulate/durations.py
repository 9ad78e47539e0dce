"""Durations of simulated work: drawn around a mean, or as measured in a past run."""

import math
import random
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from statistics import fmean

import msgspec
from msgspec import Struct

from ..errors import RunDirError
from ..records.rollout import Outcome, Scored, Settled
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
    """Groups are drawn as a whole. Their rollouts ran under the same load, so the slowest of a group is
    not as slow as the slowest of independent draws. Whole groups also keep the share of groups whose
    rewards are all equal, which are not trained on."""
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
    """Seconds the environment takes after each turn."""
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
        return [
            SampledRollout(rollout(), float(rng.random() < 0.5)) for _ in range(GROUP_SIZE)
        ]

    return Durations(
        groups=[group() for _ in range(count // GROUP_SIZE)],
        train_s=[around(means.train_s) for _ in range(count)],
        update_s=[around(means.update_s) for _ in range(count)],
        ship_s=[0.01],
        num_bytes=[means.rollout_bytes],
        num_tokens=[means.rollout_tokens],
        fails=means.failure_rate,
    )


class _MetricsLine(Struct, rename=lambda name: f"time/{name}"):
    step: float = 0.0
    train: float = 0.0
    publish: float = 0.0
    open: float = 0.0
    ship: float = 0.0
    update_weights: float = 0.0


def from_run(run: RunDir) -> Durations:
    """Take durations as measured in a past run, without its warm-up."""
    steady = _steady_steps(run)
    outcomes = _outcomes(run)
    scored = [outcome for _, outcome in outcomes if isinstance(outcome, Scored)]
    if not scored or not steady:
        raise RunDirError(f"{run.path} has no trained steps to take durations from")
    return Durations(
        groups=_groups(outcomes),
        train_s=[line.open + line.train + line.publish for line in steady],
        update_s=[line.update_weights for line in steady if line.update_weights] or [0.0],
        ship_s=[line.ship for line in steady],
        num_bytes=[rollout.ref.length for rollout in scored],
        num_tokens=[rollout.num_tokens for rollout in scored],
        fails=1 - len(scored) / len(outcomes),
    )


def measured_step_s(run: RunDir) -> float:
    """Return the mean time of a step in a past run, without its warm-up."""
    return fmean(line.step for line in _steady_steps(run))


def _steady_steps(run: RunDir) -> list[_MetricsLine]:
    """Return the metrics of all steps but the first tenth, the warm-up."""
    if not run.metrics.exists():
        raise RunDirError(
            f"{run.path} is not a run that trained: it has no {run.metrics.name}"
        )
    lines = [line for _, _, line in MetricsFile(run.metrics).lines()]
    steady = lines[len(lines) // 10 :]
    return [msgspec.json.decode(line, type=_MetricsLine) for line in steady]


def _groups(outcomes: list[tuple[int, Outcome]]) -> list[list[SampledRollout]]:
    groups: dict[int, list[SampledRollout]] = defaultdict(list)
    for group_id, outcome in outcomes:
        if isinstance(outcome, Scored):
            groups[group_id].append(SampledRollout(outcome.timing.total_s, outcome.reward))
    return list(groups.values())


def _outcomes(run: RunDir) -> list[tuple[int, Outcome]]:
    """Return the scored and failed rollouts of training, with the id of their group."""
    decode = msgspec.msgpack.Decoder(Settled).decode
    with closing(sqlite3.connect(f"file:{run.ledger}?mode=ro", uri=True)) as db:
        rows = db.execute(
            "SELECT group_id, record FROM rollouts JOIN groups USING (group_id) "
            "WHERE outcome IN ('scored', 'failed') AND fate IS NOT 'eval' ORDER BY rollout_id"
        )
        return [(group_id, decode(record).outcome) for group_id, record in rows]
