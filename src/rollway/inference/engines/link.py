"""Sends requests to one engine. Every failure becomes an EngineError that names the engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from datetime import UTC, datetime

from msgspec import Struct

from ...config.credentials import without_credentials
from ...errors import UNREADABLE, EngineAway, EngineError, EngineLate
from ...model.shape import ModelShape
from ..http import endpoint
from ..http.client import JSON, ConnectionCheck, HttpClient, HttpReply
from ..http.connection import Connection
from ..http.endpoint import ServedModel, read_all
from ..http.framing import HttpAway, HttpError
from .dialect import Dialect, EngineCall
from .sglang import Sglang
from .vllm import Vllm

INTERNAL_ERROR = 500
HEALTH_PATH = "/health"


class EngineAccess(Struct, frozen=True):
    """The address of an engine, and how to use it. An empty `model` means the first that it serves."""

    url: str
    deadline_s: float
    """How long a request may take, unless the caller says otherwise."""
    model: str = ""
    key: str = ""


class EngineLink:
    def __init__(self, http: HttpClient, access: EngineAccess, url: str) -> None:
        self._http = http
        self._access = access
        self._was_dropped: dict[asyncio.Timeout, bool] = {}
        """The requests under way, by their deadlines, and whether each was given up."""
        self.url = url

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", accept: str = JSON, *,
        deadline_s: float | None = None, check: ConnectionCheck | None = None,
    ) -> AsyncIterator[HttpReply]:  # fmt: skip
        """Give a reply with status 200 to the block, which must read it by the deadline. Everything else
        raises EngineError."""
        limit_s, url = deadline_s or self._access.deadline_s, f"{self.url}{path}"
        deadline = asyncio.timeout(limit_s)
        self._was_dropped[deadline] = False
        try:
            async with (
                deadline,
                self._http.request(method, path, body, accept, check) as reply,
            ):
                if reply.head.status != 200:
                    raise await self._refusal(url, reply)
                yield reply
        except TimeoutError:
            if self._was_dropped[deadline]:
                raise EngineAway(f"{url}: the engine was taken out of service") from None
            raise EngineLate(f"{url} did not answer within {limit_s:g} s") from None
        except HttpAway as error:
            was_sent = error.request_was_sent
            raise EngineAway(f"{url}: {error}", request_was_sent=was_sent) from None
        except HttpError as error:
            raise EngineError(f"{url}: {error}") from None
        finally:
            del self._was_dropped[deadline]

    def drop_requests(self) -> None:
        """End all requests under way with EngineAway, because the engine may not be used any more."""
        now_s = asyncio.get_running_loop().time()
        for deadline in self._was_dropped:
            with suppress(RuntimeError):  # this one is ending already
                deadline.reschedule(now_s)
                self._was_dropped[deadline] = True

    async def _refusal(self, url: str, reply: HttpReply) -> EngineError:
        """Return the error that a reply stands for. An engine that is ending answers requests in flight
        with status 500, like one that cannot handle a request. Only its health tells the two apart."""
        status, body = reply.head.status, await read_all(reply)
        message = f"{url}: {endpoint.describe_error(status, body)}"
        if status in endpoint.LATER_STATUSES:
            asked_s = endpoint.retry_after_s(reply.head.headers, datetime.now(UTC))
            return EngineAway(message, status=status, retry_after_s=asked_s)
        if status == INTERNAL_ERROR and not await self.is_healthy():
            return EngineAway(message, status=status, request_was_sent=True)
        return EngineError(message, status=status)

    async def is_healthy(self) -> bool:
        try:
            async with self._http.request("GET", HEALTH_PATH) as reply:
                await read_all(reply)
                return reply.head.status < INTERNAL_ERROR
        except HttpError:
            return False

    async def fetch(
        self, method: str, call: EngineCall, deadline_s: float | None = None
    ) -> bytearray:
        """Make a call and return its answer, which must be small."""
        async with self.request(method, call.path, call.body, deadline_s=deadline_s) as reply:
            return await read_all(reply)

    async def fetch_on(
        self, connection: Connection, call: EngineCall
    ) -> tuple[HttpReply, bytearray]:
        """Make a call on a connection that is being checked. Returns the answer, whatever its status."""
        reply = await self._http.get_on(connection, call.path)
        return reply, await read_all(reply)

    async def fetch_model(self) -> ServedModel:
        """Return the model that `access` names, or raise EngineError if the engine does not serve it."""
        limit_s, problem = self._access.deadline_s, f"no engine at {self.url}"
        try:
            async with asyncio.timeout(limit_s):
                models = await endpoint.fetch_models(self._http, "/v1/models")
        except HttpAway as error:
            raise EngineAway(f"{problem}: {error}") from None
        except TimeoutError:
            raise EngineLate(f"{problem}: no answer within {limit_s:g} s") from None
        except (HttpError, *UNREADABLE) as error:
            raise EngineError(f"{problem}: {error}") from None
        return endpoint.pick_model(models or (), self._access.model, self.url)


@contextmanager
def open_link(access: EngineAccess) -> Iterator[EngineLink]:
    """Open a link to an engine, which need not be running yet."""
    url = without_credentials(access.url).rstrip("/").removesuffix("/v1")
    try:
        http = HttpClient(url, endpoint.request_headers(access.key, url))
    except HttpError as error:
        raise EngineError(f"no engine at {url}: {error}") from None
    with closing(http):
        yield EngineLink(http, access, url)


def pick_dialect(served: ServedModel, shape: ModelShape | None) -> Dialect:
    """Return the dialect of the engine that lists this model. The entry says whose engine it is."""
    return Sglang(shape) if served.owned_by == "sglang" else Vllm()
