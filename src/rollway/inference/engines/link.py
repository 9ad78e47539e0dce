"""Requests to one engine. Whatever goes wrong is an EngineError that names it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...errors import UNREADABLE, EngineAway, EngineError, EngineLate
from ..http.client import ConnectionCheck, HttpClient, HttpReply
from ..http.connection import Connection
from ..http.endpoint import AWAY, ServedModel, headers, pick, read_all, served_models
from ..http.framing import HttpAway, HttpError
from ..replies.routes import RouteShape
from .dialect import Dialect, EngineCall, problem
from .sglang import Sglang
from .vllm import Vllm


class EngineLink:
    """One engine's address, and the connections to it."""

    def __init__(self, http: HttpClient, url: str, deadline_s: float) -> None:
        self._http = http
        self.url = url
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", accept: str = "application/json", *,
        deadline_s: float | None = None, vouch: ConnectionCheck | None = None,
    ) -> AsyncIterator[HttpReply]:  # fmt: skip
        """A reply with status 200 whose body ends by the deadline; else EngineError says why not."""
        limit_s = deadline_s or self._deadline_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.request(method, path, body, accept, vouch) as reply,
            ):
                status = reply.head.status
                if status != 200:
                    said = f"{self.url}{path}: {problem(status, await read_all(reply))}"
                    raise EngineAway(said, was_asked=True) if status in AWAY else EngineError(said)
                yield reply
        except TimeoutError:
            raise EngineLate(f"{self.url}{path} did not answer within {limit_s:g} s") from None
        except HttpAway as error:
            raise EngineAway(f"{self.url}{path}: {error}", was_asked=error.was_asked) from None
        except HttpError as error:
            raise EngineError(f"{self.url}{path}: {error}") from None

    async def text(self, method: str, call: EngineCall, deadline_s: float | None = None) -> bytearray:
        """A small answer."""
        async with self.request(method, call.path, call.body, deadline_s=deadline_s) as reply:
            return await read_all(reply)

    async def text_on(self, connection: Connection, call: EngineCall) -> tuple[HttpReply, bytearray]:
        """A small answer on a connection that is being vouched for, whatever its status."""
        reply = await self._http.ask_on(connection, call.path)
        return reply, await read_all(reply)

    async def served(self, model: str) -> ServedModel:
        """The model called `model` (the first, if no name is given), if the engine answers at all."""
        try:
            async with asyncio.timeout(self._deadline_s):
                models = await served_models(self._http, "/v1/models")
        except HttpAway as error:
            raise EngineAway(f"no engine at {self.url}: {error}") from None
        except (HttpError, TimeoutError, *UNREADABLE) as error:
            said = str(error) or type(error).__name__
            raise EngineError(f"no engine at {self.url}: {said}") from None
        return pick(models or (), model, self.url)


@asynccontextmanager
async def open_link(url: str, key: str, deadline_s: float) -> AsyncIterator[EngineLink]:
    """A link to whoever is at `url`, or will be."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        http = HttpClient(url, headers(key))
    except HttpError as error:
        raise EngineError(f"no engine at {url}: {error}") from None
    try:
        yield EngineLink(http, url, deadline_s)
    finally:
        http.close()


def dialect_of(served: ServedModel, shape: RouteShape | None) -> Dialect:
    """How an engine is spoken to: its list of models says whose it is."""
    return Sglang(shape) if served.owned_by == "sglang" else Vllm()
