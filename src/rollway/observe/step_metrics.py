"""The metrics of a step, from the groups that closed for it. Pure."""

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


class _Sum(Struct):
    """Of one quantity over rollouts or groups."""

    total: float = 0.0
    count: int = 0
    most: float = float("-inf")

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.most = max(self.most, value)

    @property
    def mean(self) -> float:
        return self.total / self.count


class StepTally:
    """Takes closed groups one at a time, so that no call takes long, however large a step is."""

    def __init__(self, manifest: BatchManifest, correct_at: float) -> None:
        self._manifest = manifest
        self._correct_at = correct_at
        self._rewards: list[float] = []
        self._means: defaultdict[str, _Sum] = defaultdict(_Sum)
        """Quantities of which the mean is told, …"""
        self._peaks: defaultdict[str, _Sum] = defaultdict(_Sum)
        """… those of which the mean and the greatest are, as `name/mean` and `name/max`, …"""
        self._counts: Counter[str] = Counter()
        """… and those that are counted."""
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

    def _add_rollout(self, one: Scored) -> None:
        self._rewards.append(one.reward)
        for name, value in one.rewards.items():
            self._means[f"reward/{name}/mean"].add(value)
        for name, value in one.metrics.items():
            self._means[f"metric/{name}/mean"].add(value)
        self._means["solve_rate"].add(one.reward >= self._correct_at)
        self._means["truncated"].add(one.stop == "length")
        self._stops[one.stop.replace("/", "_")] += 1
        self._peaks["seq_len"].add(one.num_tokens)
        self._peaks["completion_len"].add(one.num_trainable)
        self._peaks["num_turns"].add(one.num_turns)
        for phase in PHASES:
            self._peaks[f"timing/{phase}"].add(getattr(one.timing, f"{phase}_s"))
        shown = {sign for row in one.rows for sign in row.detected}
        for sign in get_args(Detection):
            self._means[f"filters/{sign}"].add(sign in shown)
        self._counts["scored/rollouts"] += 1
        self._counts["scored/tokens"] += one.num_trainable

    def _add_to_env(self, env: str, one: Scored) -> None:
        mine = f"env/{env}"
        self._means[f"{mine}/reward/mean"].add(one.reward)
        self._means[f"{mine}/solve_rate"].add(one.reward >= self._correct_at)
        self._means[f"{mine}/completion_len/mean"].add(one.num_trainable)
        self._means[f"{mine}/num_turns/mean"].add(one.num_turns)
        self._means[f"{mine}/truncated"].add(one.stop == "length")

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
        """By their declared names. Of what nothing closed has, there is no mean."""
        counted, num_scored = self._counts, len(self._rewards)
        named = ("scored/rollouts", "scored/tokens", "filters/left_out", "filters/filtered",
                 "filters/too_few", "filters/stale", "errors/cancelled", "batch/rollouts",
                 *(f"errors/{boundary}" for boundary in get_args(Boundary)))  # fmt: skip
        return {
            **{name: one.mean for name, one in self._means.items()},
            **{f"{name}/mean": one.mean for name, one in self._peaks.items()},
            **{f"{name}/max": one.most for name, one in self._peaks.items()},
            **self._all_rewards(),
            **{f"stop/{condition}": count / num_scored for condition, count in self._stops.items()},
            **{name: counted[name] for name in named},
            **{name: count for name, count in counted.items() if name.startswith("env/")},
            "batch/rows": len(self._manifest.rows),
            "batch/tokens": self._manifest.num_tokens,
            "batch/micro_batches": len(self._manifest.micro_batches),
        }

    def _all_rewards(self) -> dict[str, float]:
        if not self._rewards:
            return {}
        mean = fmean(self._rewards)
        squares = [(reward - mean) ** 2 for reward in self._rewards]
        return {"reward/all/mean": mean, "reward/all/std": fmean(squares) ** 0.5}


def step_metrics(
    manifest: BatchManifest, closed: Iterable[ClosedGroup], correct_at: float = 1.0
) -> dict[str, float]:
    """All that the batch of a step says, at once."""
    tally = StepTally(manifest, correct_at)
    for one in closed:
        tally.add(one)
    return tally.metrics()


def speed(scored: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """How long a step took, and how much was scored in that time."""
    return {
        "time/step": elapsed_s,
        "throughput/tokens": scored.get("scored/tokens", 0) / elapsed_s,
        "throughput/rollouts": scored.get("scored/rollouts", 0) / elapsed_s,
    }


def lag_metrics(lags: Mapping[str, LagStats]) -> dict[str, float]:
    """Of every process, and the orchestrator's once more under the name other tools know."""
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
    """How often and how long each process's loop was held, and calls in its lanes took too long."""
    metrics: dict[str, float] = {}
    for process, culprits in stalls.items():
        for one in culprits:
            name = f"{'stalls' if one.kind == 'loop' else 'slow_calls'}/{process}"
            metrics[f"{name}/count"] = metrics.get(f"{name}/count", 0) + one.count
            metrics[f"{name}/seconds"] = metrics.get(f"{name}/seconds", 0.0) + one.total_s
    return metrics


def stall_records(stalls: Mapping[str, Iterable[Stall]]) -> list[dict[str, Any]]:
    """The culprits themselves, for a line of `metrics.jsonl`."""
    return [
        {"process": process, **msgspec.to_builtins(one)}
        for process, culprits in stalls.items()
        for one in culprits
    ]
