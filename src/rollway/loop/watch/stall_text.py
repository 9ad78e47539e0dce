"""Stalls and lateness in words: the same for logs and console."""

from ...records.lag import LateWindow, Stall


def stall_text(stall: Stall) -> str:
    """What one place did, once or over a window."""
    place = f"{stall.where} in {stall.function}" if stall.function else stall.where
    longest = f"{ms(stall.longest_s)} ms"
    often = f"{stall.count} times, {ms(stall.total_s)} ms in all, at most {longest}"
    if stall.kind == "lane":
        took = longest if stall.count == 1 else often
        return f"{stall.call} took {took} in its process, at {place} (no loop was held)"
    held = f"for {longest}" if stall.count == 1 else often
    return f"loop held {held} by {place}"


def late_text(late: LateWindow) -> str:
    """A window that was later than allowed, and who is to blame."""
    text = f"loop late: {late.stat} {ms(late.lag_s)} ms, above watch.warn_{late.stat}_ms = " + (
        f"{ms(late.limit_s)} (window {late.num_windows} so far)"
    )
    if late.culprit is None:
        return f"{text}; nobody was seen holding it: is the machine overloaded?"
    one = late.culprit
    times = "once" if one.count == 1 else f"{one.count} times"
    return f"{text}; {one.where} in {one.function} held it {times}, {ms(one.total_s)} ms in all"


def ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
