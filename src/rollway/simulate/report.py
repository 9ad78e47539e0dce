"""Reports a simulated run in a few lines."""

from statistics import fmean

from ..config.plan import Plan
from .world import SLOTS, SimulationTally


def report(
    tally: SimulationTally, slots: int, plan: Plan, measured_s: float = 0.0
) -> list[str]:
    now_s, num_settled, steps_s = tally.now_s, tally.num_settled, tally.steps_s
    head = f"{num_settled:,} rollouts and {len(steps_s):,} steps in {now_s:,.0f} simulated s"
    lines = [head, f"the run gave up: {tally.gave_up}"] if tally.gave_up else [head]
    steady = steps_s[len(steps_s) // 10 :]
    if not steady or not now_s:
        return lines
    step_s = fmean(steady)
    num_trained = sum(tally.staleness.values())
    mean = sum(stale * count for stale, count in tally.staleness.items()) / max(
        1, num_trained
    )
    total_us = sum(tally.waits_us.values()) or 1
    waits = [f"{cause} {us / total_us:.0%}" for cause, us in tally.waits_us.most_common(3)]
    return [
        *lines,
        f"step             {step_s:.2f} s{_compare(step_s, measured_s)}",
        f"rollouts         {num_settled / now_s:.1f} a second",
        f"engine idle      {1 - tally.busy_s / (slots * now_s):.0%} of {slots} slots",
        f"trainer idle     {1 - tally.training_s / now_s:.0%}",
        f"staleness        {mean:.2f} mean, {max(tally.staleness, default=0)} at most",
        f"payload          {tally.most_bytes / 1e6:,.1f} MB at most",
        f"in flight        {tally.most_in_flight} at most",
        f"steps wait for   {', '.join(waits)}",
        f"limited by       {_limit(tally, plan)}",
    ]


BUSY = 0.9
"""A trainer that trains for this share of the time is what limits a run."""


def _limit(tally: SimulationTally, plan: Plan) -> str:
    """Name what would have to change for the run to be faster, from what the simulated run did."""
    training = tally.training_s / tally.now_s
    if training >= BUSY:
        return f"the trainer, which trains {training:.0%} of the time"
    bound, us = tally.binds_us.most_common(1)[0]
    share = us / (sum(tally.binds_us.values()) or 1)
    if bound == SLOTS:
        return f"{plan.slots_key}: all slots are taken {share:.0%} of the time"
    if bound == "nothing":
        return "nothing but the time that rollouts take"
    return f"{bound}, {share:.0%} of the time"


def _compare(step_s: float, measured_s: float) -> str:
    if not measured_s:
        return ""
    return f" (measured: {measured_s:.2f} s, {step_s / measured_s - 1:+.0%})"
