"""What engines and chat endpoints share over HTTP: a key, a list of models, small bodies."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec
from msgspec import Struct

from ...errors import EngineError, did_you_mean
from ..engines.dialect import problem
from .client import HttpClient, HttpReply
from .framing import HttpAway, HttpError

MAX_BODY_BYTES = 8 << 20
"""Of a body that is read whole; larger ones are refused."""
MAX_NAMED = 10
"""Models that an error lists."""
NO_LIST = (404, 405, 501)
"""What an endpoint that does not list its models answers."""


class ServedModel(Struct, frozen=True):
    """A model that an endpoint lists."""

    id: str
    owned_by: str | None = None


class _Models(Struct, frozen=True):
    data: list[ServedModel]


def headers(key: str) -> Mapping[str, str]:
    """What is sent with every request; `key` may be empty."""
    known = {"User-Agent": "rollway"}
    return {**known, "Authorization": f"Bearer {key}"} if key else known


async def read_all(reply: HttpReply) -> bytearray:
    """A body that is small."""
    body = bytearray()

    def take(buffer: bytes | bytearray, start: int, end: int) -> None:
        if len(body) + end - start > MAX_BODY_BYTES:
            raise HttpError(f"a body of more than {MAX_BODY_BYTES} bytes")
        body.extend(memoryview(buffer)[start:end])

    await reply.read(take)
    return body


async def served_models(http: HttpClient, path: str) -> list[ServedModel] | None:
    """The models an endpoint lists at `path`; None if it lists none to anybody."""
    async with http.request("GET", path) as reply:
        status, body = reply.head.status, await read_all(reply)
    if status in NO_LIST:
        return None
    if status != 200:
        raise (HttpAway if status in AWAY else HttpError)(problem(status, body))
    return msgspec.json.decode(body, type=_Models).data


def pick(models: Sequence[ServedModel], wanted: str, url: str) -> ServedModel:
    """The model called `wanted`, or the first if no name is given."""
    if not models:
        raise EngineError(f"the engine at {url} serves no model")
    if not wanted:
        return models[0]
    names = [one.id for one in models]
    if wanted not in names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        listed = ", ".join(names[:MAX_NAMED])
        hint = did_you_mean(wanted, names)
        raise EngineError(f"no model '{wanted}' at {url}{hint} (it serves {listed}{more})")
    return models[names.index(wanted)]


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
