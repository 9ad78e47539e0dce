"""A client of one engine: completions for workers, weight updates for the orchestrator."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np

from ..errors import EngineError
from ..loop.lanes import thread_to_the_end
from ..records.turn import Routes, Sampling, Turn
from .binary import SAFETENSORS, decode_reply
from .body import BodyCutter, Spool
from .columns import Columns
from .dialects.dialect import Call, Dialect, problem
from .dialects.sglang import Sglang
from .dialects.vllm import Vllm
from .endpoint import headers, pick, read_all, served_models
from .framing import HttpError
from .http import HttpClient, Reply
from .longreply import LongReplies
from .prompt import Prompt
from .routes import RouteShape, Wanted

INLINE_BODY_BYTES = 64 << 10
"""Bodies up to this size are read as they come."""
INLINE_ROUTES_BYTES = 1 << 20
"""Routes up to this size are decoded on the loop: at several GB/s, well under a millisecond."""
INLINE_JSON_BYTES = 256 << 10
"""JSON up to this size, without routes, is parsed on the loop."""
MAX_LARGE_BODIES = 2
"""Large bodies read at a time; the others wait in the kernel. Bursts, not sums, make a loop late."""
ACCEPT = f"{SAFETENSORS}, application/json;q=0.9"


class Engine:
    """One engine. `version` is the policy it is known to sample from."""

    def __init__(
        self, http: HttpClient, url: str, model: str, dialect: Dialect, *,
        routes: bool, deadline_s: float, long_replies: LongReplies | None,
    ) -> None:  # fmt: skip
        self._http = http
        self._url = url
        self._model = model
        self._dialect = dialect
        self._routes = routes
        self._deadline_s = deadline_s
        self._long_replies = long_replies
        self._spools: asyncio.LifoQueue[Spool] = asyncio.LifoQueue()
        for _ in range(MAX_LARGE_BODIES):
            self._spools.put_nowait(Spool())
        self.version = 0

    async def complete(
        self, prompt: Prompt, sampling: Sampling, stop_ids: list[int], routes_start: int
    ) -> Turn:
        """Draw one reply. EngineError says why there is none."""
        start = routes_start if self._routes else None
        wanted = Wanted(routes_start, len(prompt), sampling.max_tokens)
        version = self.version
        body = self._dialect.request(self._model, prompt, sampling, stop_ids, start)
        async with (
            self._request("POST", self._dialect.path, body, ACCEPT) as reply,
            self._spool_for(reply) as spool,
        ):
            if reply.head.headers.get("content-type") == SAFETENSORS:
                drawn, routes = await self._take_binary(reply, spool)
            else:
                drawn, routes = await self._take_json(reply, spool, wanted)
        if self._routes and routes is None:
            raise EngineError(
                "the engine's reply has no routes: start it with --enable-return-routed-experts, or "
                "set engine.routes=false for a model without experts"
            )
        versions = drawn.versions
        return Turn(
            prompt_ids=prompt.ids,
            completion_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            versions=np.full(len(drawn.token_ids), version, np.int32) if versions is None else versions,
            temperature=sampling.temperature,
            finish_reason=drawn.finish_reason,
            routes=routes if self._routes else None,
            routes_start=routes_start if self._routes else 0,
        )

    async def _take_binary(self, reply: Reply, spool: Spool) -> tuple[Columns, Routes | None]:
        await reply.read(spool.add)
        small = spool.length <= INLINE_ROUTES_BYTES
        return decode_reply(spool) if small else await thread_to_the_end(decode_reply, spool)

    async def _take_json(
        self, reply: Reply, spool: Spool, wanted: Wanted
    ) -> tuple[Columns, Routes | None]:
        dialect = self._dialect
        cutter = BodyCutter(
            dialect.bulk_keys, spool, lambda key, head: dialect.unneeded_chars(key, head, wanted)
        )
        await reply.read(cutter.feed, cutter)
        drawn = await self._columns(cutter.rest)
        if not self._routes:
            return drawn, None
        args = cutter.bulks, wanted, len(drawn.token_ids)
        small = spool.length <= INLINE_ROUTES_BYTES
        return drawn, dialect.routes(*args) if small else await thread_to_the_end(dialect.routes, *args)

    async def _columns(self, rest: bytearray) -> Columns:
        if self._long_replies is None or len(rest) <= INLINE_JSON_BYTES:
            return self._dialect.columns(rest)
        return await self._long_replies.columns(self._dialect.name, rest)

    @asynccontextmanager
    async def _spool_for(self, reply: Reply) -> AsyncIterator[Spool]:
        """Memory for a body: its own for a small one; a large one waits for a place."""
        length = reply.head.length
        if length is not None and length <= INLINE_BODY_BYTES:
            yield Spool(length)
            return
        spool = await self._spools.get()
        try:
            spool.reserve(length or 0)
            yield spool
        finally:
            spool.clear()
            self._spools.put_nowait(spool)

    async def update_weights(self, path: str, version: int) -> None:
        """Load new weights between two decoding steps; requests in flight go on with them."""
        pause, load, go_on = self._dialect.update_weights(path, version)
        try:
            await self._post(pause)
            for call in load:
                answer = await self._post(call)
                if answer.get("success") is False:
                    raise EngineError(f"{self._url}{call.path}: {answer.get('message', 'refused')}")
        except BaseException:  # also if nobody waits any more: decoding must go on
            with suppress(EngineError):  # what went wrong first is what to tell
                await self._post(go_on)
            raise
        await self._post(go_on)
        self.version = version

    async def weight_version(self) -> str:
        """What the engine says it samples from; empty if it does not say."""
        try:
            answer = await self._ask("GET", self._dialect.weight_version)
        except EngineError as error:
            if "HTTP 404" in str(error):
                return ""
            raise
        return str(answer.get("weight_version", ""))

    async def _post(self, call: Call) -> dict[str, object]:
        return await self._ask("POST", call)

    async def _ask(self, method: str, call: Call) -> dict[str, object]:
        """A small JSON answer; empty if there is none."""
        async with self._request(method, call.path, call.body) as reply:
            body = await read_all(reply)
        try:
            return msgspec.json.decode(body, type=dict[str, object])
        except msgspec.MsgspecError:
            return {}

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes = b"", accept: str = "application/json"
    ) -> AsyncIterator[Reply]:
        """A reply with status 200 whose body ends by the deadline; else EngineError says why not."""
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                self._http.request(method, path, body, accept) as reply,
            ):
                if reply.head.status != 200:
                    said = problem(reply.head.status, await read_all(reply))
                    raise EngineError(f"{self._url}{path}: {said}")
                yield reply
        except TimeoutError:
            raise EngineError(
                f"{self._url}{path} did not answer within {self._deadline_s:g} s"
            ) from None
        except HttpError as error:
            raise EngineError(f"{self._url}{path}: {error}") from None


@asynccontextmanager
async def connect(
    url: str, *, routes: bool, deadline_s: float, shape: RouteShape | None = None,
    long_replies: LongReplies | None = None, model: str = "", key: str = "",
) -> AsyncIterator[Engine]:  # fmt: skip
    """An engine that answers and serves `model` (any, if not named); its dialect is what it says."""
    url = url.rstrip("/").removesuffix("/v1")
    http: HttpClient | None = None
    try:
        async with asyncio.timeout(deadline_s):
            http = HttpClient(url, headers(key))
            models = await served_models(http, "/v1/models")
    except (HttpError, TimeoutError, msgspec.MsgspecError) as error:
        if http is not None:
            http.close()
        raise EngineError(f"no engine at {url}: {error or type(error).__name__}") from None
    try:
        served = pick(models or (), model, url)
        dialect: Dialect = Sglang(shape) if served.owned_by == "sglang" else Vllm()
        yield Engine(
            http, url, served.id, dialect,
            routes=routes, deadline_s=deadline_s, long_replies=long_replies,
        )  # fmt: skip
    finally:
        http.close()
