"""The metrics of a run's processes over a step, and how fast the step went."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..records.lag import LAG_STATS, LagStats, Stall


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
