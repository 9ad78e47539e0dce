"""Computes the metrics of a step from the groups that closed for it. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, get_args

import msgspec
from msgspec import Struct, structs

from ..config.plan import env_name
from ..records.batch import BatchManifest
from ..records.group import ClosedGroup
from ..records.lag import LAG_STATS, LagStats, Stall, Waits
from ..records.rollout import Boundary, Detection, Scored

PHASES = ("queue", "engine", "env", "scoring", "total")
ALWAYS_COUNTED = (
    "scored/rollouts",
    "scored/tokens",
    "errors/cancelled",
    "batch/rollouts",
    *(f"filters/{fate}" for fate in ("left_out", "filtered", "too_few", "stale")),
    *(f"errors/{boundary}" for boundary in get_args(Boundary)),
)
"""Counts that every step reports, also if they are 0."""


class _Sum(Struct):
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
    """Collects the metrics of a step. Groups are added one at a time, so that no call takes long."""

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
            self._add_rollout(env, member.scored)
            if closed.fate == "trained" and member.rollout_id not in closed.left_out:
                self._counts["batch/rollouts"] += 1
                stale = self._manifest.trains_version - member.scored.first_version
                self._peaks["off_policy"].add(stale)
        counts = self._counts
        for _, failed in group.failed:
            counts[f"errors/{failed.boundary}"] += 1
        counts[f"env/{env}/rollouts"] += len(group.members)
        counts[f"env/{env}/errors"] += len(group.failed)
        counts["errors/cancelled"] += len(group.cancelled)
        self._add_group(closed)

    def _add_rollout(self, env: str, rollout: Scored) -> None:
        means, peaks = self._means, self._peaks
        self._rewards.append(rollout.reward)
        for name, value in rollout.rewards.items():
            means[f"reward/{name}/mean"].add(value)
        for name, value in rollout.metrics.items():
            means[f"metric/{name}/mean"].add(value)
        for scope in ("", f"env/{env}/"):
            means[f"{scope}solve_rate"].add(rollout.reward >= self._correct_at)
            means[f"{scope}truncated"].add(rollout.stop == "length")
        means[f"env/{env}/reward/mean"].add(rollout.reward)
        means[f"env/{env}/completion_len/mean"].add(rollout.num_trainable)
        means[f"env/{env}/num_turns/mean"].add(rollout.num_turns)
        self._stops[rollout.stop.replace("/", "_")] += 1
        peaks["seq_len"].add(rollout.num_tokens)
        peaks["completion_len"].add(rollout.num_trainable)
        peaks["num_turns"].add(rollout.num_turns)
        for phase in PHASES:
            peaks[f"timing/{phase}"].add(getattr(rollout.timing, f"{phase}_s"))
        detected = {sign for row in rollout.rows for sign in row.detected}
        for sign in get_args(Detection):
            means[f"filters/{sign}"].add(sign in detected)
        self._counts["scored/rollouts"] += 1
        self._counts["scored/tokens"] += rollout.num_trainable

    def _add_group(self, closed: ClosedGroup) -> None:
        self._counts[f"filters/{closed.fate}"] += 1
        if closed.fate == "trained":
            self._counts["filters/left_out"] += len(closed.left_out)
        right = [member.scored.reward >= self._correct_at for member in closed.group.members]
        means = self._means
        if right:
            means["solve_all"].add(all(right))
            means["solve_none"].add(not any(right))
            means["filters/zero_advantage"].add(closed.fate == "zero_advantage")

    def metrics(self) -> dict[str, float]:
        """Return the metrics by their declared names. A mean of nothing is left out."""
        counts, peaks, manifest = self._counts, self._peaks, self._manifest
        num_scored = len(self._rewards)
        return {
            **{name: values.mean for name, values in self._means.items()},
            **{f"{name}/mean": values.mean for name, values in peaks.items()},
            **{f"{name}/max": values.maximum for name, values in peaks.items()},
            **self._reward_metrics(),
            **{f"stop/{stop}": count / num_scored for stop, count in self._stops.items()},
            **{name: counts[name] for name in ALWAYS_COUNTED},
            **{name: count for name, count in counts.items() if name.startswith("env/")},
            "batch/rows": len(manifest.rows),
            "batch/approximate_rows": sum(row.is_approximate for row in manifest.rows),
            "batch/tokens": manifest.num_tokens,
            "batch/micro_batches": len(manifest.micro_batches),
        }

    def _reward_metrics(self) -> dict[str, float]:
        if not self._rewards:
            return {}
        mean = fmean(self._rewards)
        squares = [(reward - mean) ** 2 for reward in self._rewards]
        return {"reward/all/mean": mean, "reward/all/std": fmean(squares) ** 0.5}


def speed(scored: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    return {
        "time/step": elapsed_s,
        "throughput/tokens": scored.get("scored/tokens", 0) / elapsed_s,
        "throughput/rollouts": scored.get("scored/rollouts", 0) / elapsed_s,
    }


def lag_metrics(lags: Mapping[str, LagStats]) -> dict[str, float]:
    """Return the lag of every process, and the orchestrator's also under the name other tools use."""
    scopes = [("", lags["orchestrator"])] if "orchestrator" in lags else []
    scopes += [(f"{process}/", lag) for process, lag in lags.items()]
    return {
        f"event_loop_lag/{scope}{stat}": getattr(lag, stat)
        for scope, lag in scopes
        for stat in LAG_STATS
    }


KINDS = {"loop": "stalls", "lane": "slow_calls"}


def late_metrics(waits: Mapping[str, Waits]) -> dict[str, float]:
    """Return the seconds for which each process's loop was late, by cause."""
    return {
        f"late/{process}/{field.removesuffix('_s')}": seconds
        for process, each in waits.items()
        for field, seconds in structs.asdict(each).items()
        if seconds
    }


def stall_metrics(stalls: Mapping[str, Iterable[Stall]]) -> dict[str, float]:
    """Return how often and how long each event loop was held, and the same for slow calls in lanes."""
    metrics: defaultdict[str, float] = defaultdict(int)
    for process, held in stalls.items():
        for stall in held:
            kind = KINDS.get(stall.kind)
            if kind is None:
                continue  # late_metrics count these
            metrics[f"{kind}/{process}/count"] += stall.count
            metrics[f"{kind}/{process}/seconds"] += stall.total_s
    return metrics


def stall_records(stalls: Mapping[str, Iterable[Stall]]) -> list[dict[str, Any]]:
    """Return every stall with its place in the code, for a line of `metrics.jsonl`."""
    return [
        {"process": process, **msgspec.to_builtins(stall)}
        for process, held in stalls.items()
        for stall in held
    ]
