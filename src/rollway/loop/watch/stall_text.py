"""Says in words how a loop was held or late: the same words for logs and console."""

from ...records.lag import LateWindow, Stall, Waits

LEAST_S = 0.005
"""A cause that made a loop late by less is not worth a word."""


def stall_text(stall: Stall) -> str:
    place = f"{stall.where} in {stall.function}" if stall.function else stall.where
    longest = f"{ms(stall.longest_s)} ms"
    often = f"{stall.count} times, {ms(stall.total_s)} ms in all, at most {longest}"
    if stall.kind == "lane":
        took = longest if stall.count == 1 else often
        if stall.was_killed:
            times = f"after {longest}" if stall.count == 1 else often
            return f"{stall.call} was killed at its deadline {times}, at {place}"
        return f"{stall.call} took {took} in its process, at {place} (no loop was held)"
    held = f"for {longest}" if stall.count == 1 else often
    match stall.kind:
        case "thread":
            at = f" at {place}" if place else ""
            return f"loop held {held} by thread '{stall.call}', which kept the GIL{at}"
        case "collector":
            return f"loop held {held} by the garbage collector"
        case "core":
            return f"loop late {held} because no core was free"
        case "memory":
            return f"loop late {held} because memory had to be read from a disk"
    return f"loop held {held} by {place or 'code that nobody saw'}"


def late_text(late: LateWindow) -> str:
    """Describe a window that was later than allowed, and the code that held the loop longest."""
    text = (
        f"loop late: {late.stat} {ms(late.lag_s)} ms, above the limit of {ms(late.limit_s)} ms "
        f"(window {late.num_windows} so far)"
    )
    hold, others = late.longest_hold, waits_text(late.waits)
    if hold is not None:
        times = "once" if hold.count == 1 else f"{hold.count} times"
        place = f"{hold.where} in {hold.function}"
        text += f"; {place} held it {times}, {ms(hold.total_s)} ms in all"
    if others:
        text += f"; it was late for {others}"
    return text if hold or others else f"{text}; no code was seen holding it"


def waits_text(waits: Waits) -> str:
    """Name the causes of lateness other than the loop's own code, each with its milliseconds."""
    causes = {
        "want of a core": waits.core_s,
        "another thread that kept the GIL": waits.thread_s,
        "the garbage collector": waits.collector_s,
        "memory that was read from a disk": waits.memory_s,
    }
    told = [
        f"{cause} ({ms(late_s)} ms)" for cause, late_s in causes.items() if late_s > LEAST_S
    ]
    return ", ".join(told)


def ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
