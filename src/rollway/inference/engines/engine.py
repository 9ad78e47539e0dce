"""Completions of one engine, for workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import numpy as np

from ...errors import EngineAway, EngineError
from ...loop.lanes.lanes import thread_to_the_end
from ...records.turn import Routes, Sampling, Turn
from ..http.client import HttpReply
from ..http.connection import Connection
from ..replies.body import BodyBuffer, BodyBuffers, BodyCutter
from ..replies.columns import SAFETENSORS, ReplyColumns, decode_reply
from ..replies.long_replies import LongReplies
from ..replies.routes import RouteShape, WantedRoutes
from .dialect import Dialect
from .link import EngineLink, dialect_of, open_link
from .prompt import Prompt
from .status import has_at_least, version_in

INLINE_ROUTES_BYTES = 1 << 20
"""Routes up to this size are decoded on the loop: at several GB/s, well under a millisecond."""
INLINE_JSON_BYTES = 256 << 10
"""JSON up to this size, without routes, is parsed on the loop."""
ACCEPT = f"{SAFETENSORS}, application/json;q=0.9"


class Completer(Protocol):
    """Whoever draws replies: an engine, or a seat at one of several."""

    async def complete(
        self, prompt: Prompt, sampling: Sampling, stop_ids: list[int], routes_start: int
    ) -> Turn:
        """Draw one reply. EngineError says why there is none."""


class Engine:
    """One engine. `version` is the policy it is known to sample from: a request is labelled with it
    unless the reply says more, and goes only to a process that has it."""

    def __init__(
        self, link: EngineLink, model: str, dialect: Dialect, *,
        routes: bool, spools: BodyBuffers, long_replies: LongReplies | None,
    ) -> None:  # fmt: skip
        self._link = link
        self.model = model
        self._dialect = dialect
        self._routes = routes
        self._spools = spools
        self._long_replies = long_replies
        self._says_version = True
        self.version = 0

    @property
    def url(self) -> str:
        return self._link.url

    async def complete(
        self, prompt: Prompt, sampling: Sampling, stop_ids: list[int], routes_start: int
    ) -> Turn:
        """Draw one reply. EngineAway: another try may help; other EngineErrors say why it would not."""
        start = routes_start if self._routes else None
        wanted = WantedRoutes(routes_start, len(prompt), sampling.max_tokens)
        version = self.version
        body = self._dialect.request(self.model, prompt, sampling, stop_ids, start)
        async with (
            self._link.request("POST", self._dialect.path, body, ACCEPT, vouch=self._vouch) as reply,
            self._spools.taken_for(reply) as spool,
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

    async def _vouch(self, connection: Connection) -> None:
        """Refuse a connection to a process that is behind: one that was started again from old weights,
        or was given none. A connection ends with its process, so each is asked once for a version."""
        version = self.version
        if connection.vouched >= version or not self._says_version:
            return
        reply, body = await self._link.text_on(connection, self._dialect.weight_version)
        said = version_in(body) if reply.head.status == 200 else ""
        self._says_version = bool(said) and not reply.head.closes
        if said and not has_at_least(said, version):
            raise EngineAway(f"the engine at {self.url} has version '{said}', not {version} yet")
        connection.vouched = version

    async def _take_binary(
        self, reply: HttpReply, spool: BodyBuffer
    ) -> tuple[ReplyColumns, Routes | None]:
        await reply.read(spool.add)
        small = spool.length <= INLINE_ROUTES_BYTES
        return decode_reply(spool) if small else await thread_to_the_end(decode_reply, spool)

    async def _take_json(
        self, reply: HttpReply, spool: BodyBuffer, wanted: WantedRoutes
    ) -> tuple[ReplyColumns, Routes | None]:
        dialect = self._dialect
        cutter = BodyCutter(spool, lambda key, bulk: dialect.unneeded_chars(key, bulk, wanted))
        await reply.read(cutter.feed, cutter)
        drawn = await self._columns(cutter.rest)
        if not self._routes:
            return drawn, None
        args = cutter.bulks, wanted, len(drawn.token_ids)
        small = spool.length <= INLINE_ROUTES_BYTES
        return drawn, dialect.routes(*args) if small else await thread_to_the_end(dialect.routes, *args)

    async def _columns(self, rest: bytearray) -> ReplyColumns:
        if self._long_replies is None or len(rest) <= INLINE_JSON_BYTES:
            return self._dialect.columns(rest)
        return await self._long_replies.columns(self._dialect.name, rest)


@asynccontextmanager
async def connect(
    url: str, *, routes: bool, deadline_s: float, shape: RouteShape | None = None,
    long_replies: LongReplies | None = None, model: str = "", key: str = "",
) -> AsyncIterator[Engine]:  # fmt: skip
    """An engine that answers and serves `model` (any, if not named); its dialect is what it says."""
    async with open_link(url, key, deadline_s) as link:
        served = await link.served(model)
        yield Engine(
            link, served.id, dialect_of(served, shape),
            routes=routes, spools=BodyBuffers(), long_replies=long_replies,
        )  # fmt: skip
