"""When to ask again an endpoint that said "later". Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LATER = (429, 502, 503, 529)
"""Too many requests, a gateway without its server, a server without room: what passes by itself."""
AWAY = (502, 503, 504)
"""Of those, what an engine or its gateway says while the engine itself is not there."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds that a reply's Retry-After asks for, given as a number or as a date."""
    text = headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - now).total_seconds())


def back_off_s(num_refused: int, luck: float) -> float:
    """The pause after so many refusals, spread by `luck` (0 to 1), so that callers do not return as
    one crowd."""
    whole = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_refused - 1, 16))
    return float(whole * (0.5 + luck / 2))
