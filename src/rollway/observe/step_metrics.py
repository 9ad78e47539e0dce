"""Computes the metrics of a step from the groups that closed for it. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, get_args

import msgspec
from msgspec import Struct

from ..config.plan import env_name
from ..records.batch import BatchManifest
from ..records.group import ClosedGroup
from ..records.lag import LAG_STATS, LagStats, Stall
from ..records.rollout import Boundary, Detection, Scored

PHASES = ("queue", "engine", "env", "scoring", "total")
ALWAYS_COUNTED = (
    "scored/rollouts",
    "scored/tokens",
    "filters/left_out",
    "filters/filtered",
    "filters/too_few",
    "filters/stale",
    "errors/cancelled",
    "batch/rollouts",
    *(f"errors/{boundary}" for boundary in get_args(Boundary)),
)
"""Counts that every step reports, also if they are 0."""


class _Sum(Struct):
    """The sum, count and maximum of one quantity over rollouts or groups."""

    total: float = 0.0
    count: int = 0
    maximum: float = float("-inf")

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.maximum = max(self.maximum, value)

    @property
    def mean(self) -> float:
        return self.total / self.count


class StepTally:
    """Collects the metrics of a step. Groups are added one at a time, so that no call takes long,
    however large the step is."""

    def __init__(self, manifest: BatchManifest, correct_at: float) -> None:
        self._manifest = manifest
        self._correct_at = correct_at
        self._rewards: list[float] = []
        self._means: defaultdict[str, _Sum] = defaultdict(_Sum)
        """Quantities that are reported as their mean."""
        self._peaks: defaultdict[str, _Sum] = defaultdict(_Sum)
        """Quantities that are reported as `name/mean` and `name/max`."""
        self._counts: Counter[str] = Counter()
        self._stops: Counter[str] = Counter()

    def add(self, closed: ClosedGroup) -> None:
        group, env = closed.group, env_name(closed.group.env)
        for member in group.members:
            self._add_rollout(member.scored)
            self._add_to_env(env, member.scored)
            if closed.fate == "trained" and member.rollout_id not in closed.left_out:
                self._counts["batch/rollouts"] += 1
                stale = self._manifest.trains_version - member.scored.first_version
                self._peaks["off_policy"].add(stale)
        for _, failed in group.failed:
            self._counts[f"errors/{failed.boundary}"] += 1
        self._counts[f"env/{env}/rollouts"] += len(group.members)
        self._counts[f"env/{env}/errors"] += len(group.failed)
        self._counts["errors/cancelled"] += len(group.cancelled)
        self._add_group(closed)

    def _add_rollout(self, rollout: Scored) -> None:
        self._rewards.append(rollout.reward)
        for name, value in rollout.rewards.items():
            self._means[f"reward/{name}/mean"].add(value)
        for name, value in rollout.metrics.items():
            self._means[f"metric/{name}/mean"].add(value)
        self._means["solve_rate"].add(rollout.reward >= self._correct_at)
        self._means["truncated"].add(rollout.stop == "length")
        self._stops[rollout.stop.replace("/", "_")] += 1
        self._peaks["seq_len"].add(rollout.num_tokens)
        self._peaks["completion_len"].add(rollout.num_trainable)
        self._peaks["num_turns"].add(rollout.num_turns)
        for phase in PHASES:
            self._peaks[f"timing/{phase}"].add(getattr(rollout.timing, f"{phase}_s"))
        detected = {sign for row in rollout.rows for sign in row.detected}
        for sign in get_args(Detection):
            self._means[f"filters/{sign}"].add(sign in detected)
        self._counts["scored/rollouts"] += 1
        self._counts["scored/tokens"] += rollout.num_trainable

    def _add_to_env(self, env: str, rollout: Scored) -> None:
        prefix = f"env/{env}"
        self._means[f"{prefix}/reward/mean"].add(rollout.reward)
        self._means[f"{prefix}/solve_rate"].add(rollout.reward >= self._correct_at)
        self._means[f"{prefix}/completion_len/mean"].add(rollout.num_trainable)
        self._means[f"{prefix}/num_turns/mean"].add(rollout.num_turns)
        self._means[f"{prefix}/truncated"].add(rollout.stop == "length")

    def _add_group(self, closed: ClosedGroup) -> None:
        self._counts[f"filters/{closed.fate}"] += 1
        if closed.fate == "trained":
            self._counts["filters/left_out"] += len(closed.left_out)
        right = [member.scored.reward >= self._correct_at for member in closed.group.members]
        if right:
            self._means["solve_all"].add(all(right))
            self._means["solve_none"].add(not any(right))
            self._means["filters/zero_advantage"].add(closed.fate == "zero_advantage")

    def metrics(self) -> dict[str, float]:
        """Return the metrics by their declared names. A mean of nothing is left out."""
        num_scored = len(self._rewards)
        return {
            **{name: values.mean for name, values in self._means.items()},
            **{f"{name}/mean": values.mean for name, values in self._peaks.items()},
            **{f"{name}/max": values.maximum for name, values in self._peaks.items()},
            **self._reward_metrics(),
            **{f"stop/{condition}": count / num_scored for condition, count in self._stops.items()},
            **{name: self._counts[name] for name in ALWAYS_COUNTED},
            **{name: count for name, count in self._counts.items() if name.startswith("env/")},
            "batch/rows": len(self._manifest.rows),
            "batch/tokens": self._manifest.num_tokens,
            "batch/micro_batches": len(self._manifest.micro_batches),
        }

    def _reward_metrics(self) -> dict[str, float]:
        if not self._rewards:
            return {}
        mean = fmean(self._rewards)
        squares = [(reward - mean) ** 2 for reward in self._rewards]
        return {"reward/all/mean": mean, "reward/all/std": fmean(squares) ** 0.5}


def speed(scored: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Return how long a step took, and how much was scored per second."""
    return {
        "time/step": elapsed_s,
        "throughput/tokens": scored.get("scored/tokens", 0) / elapsed_s,
        "throughput/rollouts": scored.get("scored/rollouts", 0) / elapsed_s,
    }


def lag_metrics(lags: Mapping[str, LagStats]) -> dict[str, float]:
    """Return the lag of every process, and the orchestrator's also under the name other tools use."""
    own = lags.get("orchestrator")
    return {
        **({f"event_loop_lag/{stat}": getattr(own, stat) for stat in LAG_STATS} if own else {}),
        **{
            f"event_loop_lag/{process}/{stat}": getattr(lag, stat)
            for process, lag in lags.items()
            for stat in LAG_STATS
        },
    }


def stall_metrics(stalls: Mapping[str, Iterable[Stall]]) -> dict[str, float]:
    """Return how often and how long each event loop was held, and the same for slow calls in lanes."""
    metrics: dict[str, float] = {}
    for process, held in stalls.items():
        for stall in held:
            name = f"{'stalls' if stall.kind == 'loop' else 'slow_calls'}/{process}"
            metrics[f"{name}/count"] = metrics.get(f"{name}/count", 0) + stall.count
            metrics[f"{name}/seconds"] = metrics.get(f"{name}/seconds", 0.0) + stall.total_s
    return metrics


def stall_records(stalls: Mapping[str, Iterable[Stall]]) -> list[dict[str, Any]]:
    """Return every stall with its place in the code, for a line of `metrics.jsonl`."""
    return [
        {"process": process, **msgspec.to_builtins(stall)}
        for process, held in stalls.items()
        for stall in held
    ]
