"""Sends requests to one engine. Every failure becomes an EngineError that names the engine."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from typing import TypeVar

from msgspec import Struct

from ...config.credentials import hide_credentials, without_credentials
from ...errors import UNREADABLE, EngineAway, EngineError, EngineLate
from ...model.shape import ModelShape
from ..http import endpoint
from ..http.client import ConnectionCheck, HttpClient, HttpReply
from ..http.connection import Connection
from ..http.endpoint import Fetcher, ServedModel
from ..http.framing import HttpAway, HttpError, ReplyHead
from .dialect import Dialect, EngineCall
from .sglang import Sglang
from .vllm import Vllm

T = TypeVar("T")

INTERNAL_ERROR = 500
NOT_FOUND = 404
NO_TOKENS = (
    "If it is a chat endpoint, which takes no token ids, set engine.external.fill_ids = true to train "
    "on it"
)
"""What to do about a server without the path for completions."""
HEALTH_PATH = "/health"
REDIRECTS = range(300, 400)


class EngineAccess(Struct, frozen=True):
    """The address of an engine, and how to use it. An empty `model` means the first that it serves."""

    url: str
    deadline_s: float
    """How long a request may take, unless the caller says otherwise."""
    model: str = ""
    key: str = ""


class EngineApi:
    """Makes small calls to one engine."""

    def __init__(self, http: Fetcher, access: EngineAccess, url: str) -> None:
        self._http = http
        self._access = access
        self.url = url

    async def fetch(
        self, method: str, call: EngineCall, deadline_s: float | None = None
    ) -> bytearray:
        """Make a call and return its answer. Each status but 200 raises EngineError."""
        limit_s, url = deadline_s or self._access.deadline_s, f"{self.url}{call.path}"
        with _naming(url):
            try:
                async with asyncio.timeout(limit_s):
                    head, body = await self._http.fetch(method, call.path, call.body)
            except TimeoutError:
                raise _late(url, limit_s) from None
        if head.status != 200:
            raise await self._refusal(url, head, body)
        return body

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

    async def is_healthy(self) -> bool:
        try:
            head, _ = await self._http.fetch("GET", HEALTH_PATH)
        except HttpError:
            return False
        return head.status < INTERNAL_ERROR

    async def _refusal(self, url: str, head: ReplyHead, body: bytearray) -> EngineError:
        """Return the error that a reply stands for. An engine that is ending answers requests in flight
        with status 500, like one that cannot handle a request. Only its health tells the two apart."""
        status = head.status
        message = f"{url}: {endpoint.describe_error(status, body)}"
        if status in REDIRECTS and (target := head.headers.get("location")):
            message += (
                f"; it redirects to {hide_credentials(target)}: name that address instead"
            )
        if status in endpoint.LATER_STATUSES:
            asked_s = endpoint.retry_after_s(head.headers, datetime.now(UTC))
            return EngineAway(message, status=status, retry_after_s=asked_s)
        if status == INTERNAL_ERROR and not await self.is_healthy():
            return EngineAway(message, status=status, request_was_sent=True)
        return EngineError(message, status=status)


class _UnderWay:
    """A request under way, and for whom it was made."""

    def __init__(self, limit_s: float, owner: object) -> None:
        self.deadline = asyncio.timeout(limit_s)
        self.owner = owner
        self.was_dropped = False


class EngineLink(EngineApi):
    """Also reads the large replies to requests for completions."""

    def __init__(self, http: HttpClient, access: EngineAccess, url: str) -> None:
        super().__init__(http, access, url)
        self._client = http
        self._under_way: set[_UnderWay] = set()

    async def post(
        self, path: str, body: bytes, accept: str, read: Callable[[HttpReply], Awaitable[T]],
        check: ConnectionCheck | None = None, owner: object = None,
    ) -> T:  # fmt: skip
        """Send a request, and return what `read` makes of its reply, by the deadline. A status that is
        not 200 raises EngineError. `drop_requests` ends all requests of an owner."""
        limit_s, url = self._access.deadline_s, f"{self.url}{path}"
        under_way = _UnderWay(limit_s, owner)
        self._under_way.add(under_way)
        try:
            async with under_way.deadline:
                reply = await self._client.ask("POST", path, body, accept, check)
                try:
                    if reply.head.status != 200:
                        raise await self._refusal(url, reply.head, await reply.read_all())
                    return await read(reply)
                finally:
                    self._client.give_back(reply)
        except HttpError as error:
            raise _named(url, error) from None
        except TimeoutError:
            if under_way.was_dropped:
                raise EngineAway(f"{url}: the engine was taken out of service") from None
            raise _late(url, limit_s) from None
        finally:
            self._under_way.discard(under_way)

    def drop_requests(self, owner: object) -> None:
        """End an owner's requests under way with EngineAway: it may not use the engine any more."""
        now_s = asyncio.get_running_loop().time()
        for under_way in self._under_way:
            if under_way.owner is owner:
                with suppress(RuntimeError):  # this one is ending already
                    under_way.deadline.reschedule(now_s)
                    under_way.was_dropped = True

    async def fetch_on(
        self, connection: Connection, call: EngineCall
    ) -> tuple[HttpReply, bytearray]:
        """Make a call on a connection that is being checked. Returns the answer, whatever its status."""
        reply = await self._client.get_on(connection, call.path)
        return reply, await reply.read_all()


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Turn errors of HTTP into errors that name the engine."""
    try:
        yield
    except HttpError as error:
        raise _named(url, error) from None


def _named(url: str, error: HttpError) -> EngineError:
    if isinstance(error, HttpAway):
        return EngineAway(f"{url}: {error}", request_was_sent=error.request_was_sent)
    return EngineError(f"{url}: {error}")


def _late(url: str, limit_s: float) -> EngineLate:
    return EngineLate(f"{url} did not answer within {limit_s:g} s")


@contextmanager
def open_link(access: EngineAccess) -> Iterator[EngineLink]:
    """Open a link to an engine, which need not be running yet."""
    url, headers = address_of(access)
    with naming_address(url):
        http = HttpClient(url, headers)
    with closing(http):
        yield EngineLink(http, access, url)


def address_of(access: EngineAccess) -> tuple[str, Mapping[str, str]]:
    """Return an engine's URL without credentials and version, and the headers of all requests to it."""
    url = without_credentials(access.url).rstrip("/").removesuffix("/v1")
    return url, endpoint.request_headers(access.key, url)


@contextmanager
def naming_address(url: str) -> Iterator[None]:
    try:
        yield
    except HttpError as error:
        raise EngineError(f"no engine at {url}: {error}") from None


def pick_dialect(served: ServedModel, shape: ModelShape | None) -> Dialect:
    """Return the dialect of the engine that lists this model. The entry says whose engine it is."""
    return Sglang(shape) if served.owned_by == "sglang" else Vllm()
