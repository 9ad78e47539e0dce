"""A client of one engine: completions for workers, weight updates for the orchestrator."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import aiohttp
import msgspec

from ..errors import EngineError
from ..loop.lanes import thread
from ..records.turn import Ints, Sampling, Turn
from . import dialect
from .body import BodyCutter

INLINE_BYTES = 64 << 10
"""Bodies and routes up to this size are dealt with on the loop, in well under a millisecond."""
READ_BUFFER_BYTES = 16 << 10
"""What is read from a socket at a time: bursts, not sums, make a loop late."""


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class Engine:
    """One engine at `url`. `version` is the policy it is known to sample from."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        *,
        routes: bool,
        deadline_s: float,
    ) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._routes = routes
        self._deadline_s = deadline_s
        self._large_bodies = asyncio.Lock()
        self.version = 0

    async def complete(
        self, prompt_ids: Ints, sampling: Sampling, stop_ids: list[int], routes_start: int
    ) -> Turn:
        """Draw one reply. EngineError says why there is none."""
        start = routes_start if self._routes else None
        version = self.version
        body = dialect.request(self._model, prompt_ids, sampling, stop_ids, start)
        reply = await self._post("/v1/completions", body)
        routes = None
        if reply.bulk is not None and start is not None:
            decode = dialect.decode_routes
            small = len(reply.bulk) <= INLINE_BYTES
            routes = decode(reply.bulk) if small else await thread(decode, reply.bulk)
        return dialect.turn_from_reply(reply.rest, routes, prompt_ids, sampling, version, start)

    async def update_weights(self, path: str, version: int) -> None:
        """Load new weights between two decoding steps; requests in flight go on with them."""
        await self._post("/pause?mode=keep")
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            await self._post("/collective_rpc", msgspec.json.encode(reload))
            await self._post("/reset_prefix_cache")
            new_version = {"new_version": str(version)}
            await self._post("/update_weight_version", msgspec.json.encode(new_version))
        finally:
            await self._post("/resume")
        self.version = version

    async def weight_version(self) -> str:
        """What the engine says it samples from; empty if it does not say."""
        status, reply = await self._request("GET", "/weight_info")
        if status != 200:
            return ""
        return str(msgspec.json.decode(reply.rest, type=dict[str, object]).get("weight_version", ""))

    async def _post(self, path: str, body: bytes = b"") -> BodyCutter:
        status, reply = await self._request("POST", path, body)
        if status != 200:
            raise EngineError(f"{self._url}{path}: {dialect.problem(status, bytes(reply.rest))}")
        return reply

    async def _request(self, method: str, path: str, body: bytes = b"") -> tuple[int, BodyCutter]:
        """Status and body, or EngineError if there is no answer by the deadline."""
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                self._session.request(method, self._url + path, data=body, headers=headers) as response,
            ):
                return response.status, await self._read(response)
        except TimeoutError:
            raise EngineError(
                f"{self._url}{path} did not answer within {self._deadline_s:g} s"
            ) from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{self._url}{path}: {error or type(error).__name__}") from None

    async def _read(self, response: aiohttp.ClientResponse) -> BodyCutter:
        """A body in pieces. Large ones one at a time: the others wait in the kernel, not on the loop."""
        cutter = BodyCutter()
        paced = (response.content_length or 0) > INLINE_BYTES
        async with self._large_bodies if paced else nullcontext():
            async for piece in response.content.iter_any():
                cutter.feed(piece)
        return cutter


@asynccontextmanager
async def connect(url: str, *, routes: bool, deadline_s: float) -> AsyncIterator[Engine]:
    """An engine that answers; its model's name is what it says it serves."""
    url = url.rstrip("/").removesuffix("/v1")
    connector = aiohttp.TCPConnector(limit=0)
    no_limit = aiohttp.ClientTimeout(total=None)  # each call has a deadline of its own
    async with aiohttp.ClientSession(
        connector=connector, timeout=no_limit, read_bufsize=READ_BUFFER_BYTES
    ) as session:
        try:
            async with asyncio.timeout(deadline_s), session.get(f"{url}/v1/models") as response:
                models = msgspec.json.decode(await response.read(), type=_Models)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise EngineError(f"no engine at {url}: {error or type(error).__name__}") from None
        if not models.data:
            raise EngineError(f"the engine at {url} serves no model")
        yield Engine(session, url, models.data[0].id, routes=routes, deadline_s=deadline_s)
