"""What engines and chat endpoints share over HTTP: a key, a list of models, small bodies."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from ..errors import EngineError, did_you_mean
from .dialects.dialect import problem
from .framing import HttpAway, HttpError
from .http import HttpClient, Reply
from .retry import AWAY

MAX_BODY_BYTES = 8 << 20
"""Of a body that is read whole; larger ones are refused."""
MAX_NAMED = 10
"""Models that an error lists."""
NO_LIST = (404, 405, 501)
"""What an endpoint that does not list its models answers."""


class Served(Struct, frozen=True):
    """A model that an endpoint lists."""

    id: str
    owned_by: str | None = None


class _Models(Struct, frozen=True):
    data: list[Served]


def headers(key: str) -> Mapping[str, str]:
    """What is sent with every request; `key` may be empty."""
    known = {"User-Agent": "rollway"}
    return {**known, "Authorization": f"Bearer {key}"} if key else known


async def read_all(reply: Reply) -> bytearray:
    """A body that is small."""
    body = bytearray()

    def take(buffer: bytes | bytearray, start: int, end: int) -> None:
        if len(body) + end - start > MAX_BODY_BYTES:
            raise HttpError(f"a body of more than {MAX_BODY_BYTES} bytes")
        body.extend(memoryview(buffer)[start:end])

    await reply.read(take)
    return body


async def served_models(http: HttpClient, path: str) -> list[Served] | None:
    """The models an endpoint lists at `path`; None if it lists none to anybody."""
    async with http.request("GET", path) as reply:
        status, body = reply.head.status, await read_all(reply)
    if status in NO_LIST:
        return None
    if status != 200:
        raise (HttpAway if status in AWAY else HttpError)(problem(status, body))
    return msgspec.json.decode(body, type=_Models).data


def pick(models: Sequence[Served], wanted: str, url: str) -> Served:
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
