"""Reports a simulated run in a few lines."""

from statistics import fmean

from ..config.plan import Plan
from .world import SimulationTally


def report(tally: SimulationTally, slots: int, plan: Plan, measured_s: float = 0.0) -> list[str]:
    """Return lines about throughput, idle time, staleness, memory, and what limits the run."""
    lines = [
        f"{tally.num_settled:,} rollouts and {len(tally.steps_s):,} steps in {tally.now_s:,.0f} "
        "simulated s"
    ]
    if tally.gave_up:
        lines.append(f"the run gave up: {tally.gave_up}")
    steady = tally.steps_s[len(tally.steps_s) // 10 :]
    if not steady or not tally.now_s:
        return lines
    step_s = fmean(steady)
    lines.append(f"step             {step_s:.2f} s{_compare(step_s, measured_s)}")
    lines.append(f"rollouts         {tally.num_settled / tally.now_s:.1f} a second")
    lines.append(f"engine idle      {1 - tally.busy_s / (slots * tally.now_s):.0%} of {slots} slots")
    lines.append(f"trainer idle     {1 - tally.training_s / tally.now_s:.0%}")
    num_trained = sum(tally.staleness.values())
    mean = sum(stale * count for stale, count in tally.staleness.items()) / max(1, num_trained)
    lines.append(f"staleness        {mean:.2f} mean, {max(tally.staleness, default=0)} at most")
    lines.append(f"payload          {tally.most_bytes / 1e6:,.1f} MB at most")
    lines.append(f"in flight        {tally.most_in_flight} at most; bound by {plan.binds}")
    total_us = sum(tally.waits_us.values()) or 1
    waits = ", ".join(f"{cause} {us / total_us:.0%}" for cause, us in tally.waits_us.most_common(3))
    lines.append(f"steps wait for   {waits}")
    return lines


def _compare(step_s: float, measured_s: float) -> str:
    if not measured_s:
        return ""
    return f" (measured: {measured_s:.2f} s, {step_s / measured_s - 1:+.0%})"
