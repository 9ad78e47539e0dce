"""Says in words how a loop was held or late: the same words for logs and console."""

from ...records.lag import LateWindow, Stall


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
    return f"loop held {held} by {place}"


def late_text(late: LateWindow) -> str:
    """Describe a window that was later than allowed, and the code that held the loop longest."""
    text = (
        f"loop late: {late.stat} {ms(late.lag_s)} ms, above the limit of {ms(late.limit_s)} ms "
        f"(window {late.num_windows} so far)"
    )
    hold = late.longest_hold
    if hold is None:
        return f"{text}; no code was seen holding it: is the machine overloaded?"
    times = "once" if hold.count == 1 else f"{hold.count} times"
    return f"{text}; {hold.where} in {hold.function} held it {times}, {ms(hold.total_s)} ms in all"


def ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
