"""Requests completions from one engine and turns each reply into a Turn."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import numpy as np

from ...errors import EngineAway, EngineError
from ...loop.lanes.threads import thread_to_the_end
from ...records.turn import Routes, Sampling, Turn
from ...vllm.binary_reply import SAFETENSORS
from ..http.client import HttpReply
from ..http.connection import Connection
from ..http.endpoint import ServedModel, describe_error
from ..http.framing import JSON
from ..replies.body import INLINE_BODY_BYTES, BodyBuffer, BodyBuffers, BodyCutter, bounded
from ..replies.checks import ReplyRules
from ..replies.columns import ReplyColumns, decode_reply
from ..replies.long_replies import LongReplies
from ..replies.routes import WantedRoutes
from .dialect import Dialect, Prompt
from .link import NO_TOKENS, NOT_FOUND, EngineAccess, EngineLink, open_link, pick_dialect
from .status import is_at_least, parse_version

INLINE_ROUTES_BYTES = 1 << 20
"""Routes up to this size are decoded on the loop, at several GB/s in well under a millisecond."""
INLINE_JSON_BYTES = 256 << 10
"""JSON up to this size is parsed on the loop. Routes are cut out of it before and do not count."""
ACCEPT = f"{SAFETENSORS}, {JSON};q=0.9"
Drawn = tuple[ReplyColumns, Routes | None]


class Completer(Protocol):
    """Anything that draws replies: an engine, or a PinnedEngine of a pool."""

    async def complete(
        self, prompt: Prompt, sampling: Sampling, stop_ids: list[int], routes_start: int
    ) -> Turn: ...

    @property
    def max_context(self) -> int:
        """The most tokens that a prompt and its reply may have together; 0 if that is not known."""
        ...


class ExpectedPolicy:
    """What one client expects: the version that all engines sample from, and the engines that may not be
    asked, because they failed to show that they have it."""

    def __init__(self) -> None:
        self.version = 0
        self.refused: frozenset[str] = frozenset()
        self.on_refused: Callable[[], None] = lambda: None
        """Called when `refused` changes."""

    def refuse(self, urls: Iterable[str]) -> None:
        if (refused := frozenset(urls)) != self.refused:
            self.refused = refused
            self.on_refused()


class Policies:
    """The policies of a worker's clients, by their numbers. One client cannot set another's version."""

    def __init__(self) -> None:
        self._policies: dict[int, ExpectedPolicy] = {}
        self.on_new: Callable[[ExpectedPolicy], None] = lambda policy: None

    def of(self, client: int) -> ExpectedPolicy:
        if client not in self._policies:
            policy = self._policies[client] = ExpectedPolicy()
            self.on_new(policy)
        return self._policies[client]


class Engine:
    """One engine. `policy` is what it is expected to sample from. If the engine reports its version, a
    request is sent only to a process that has that version or a later one. The turn is labelled with the
    expected version, unless the reply reports the version of each token."""

    def __init__(
        self, link: EngineLink, served: ServedModel, dialect: Dialect, buffers: BodyBuffers,
        long_replies: LongReplies | None, rules: ReplyRules,
    ) -> None:  # fmt: skip
        self._link = link
        self.url = link.url
        self.model = served.id
        self.max_context = served.max_model_len or 0
        self._dialect = dialect
        self._rules = rules
        self._routes = rules.wants_routes
        self._buffers = buffers
        self._long_replies = long_replies
        self._reports_version = True
        self.policy = ExpectedPolicy()

    async def complete(
        self, prompt: Prompt, sampling: Sampling, stop_ids: list[int], routes_start: int,
        policy: ExpectedPolicy | None = None,
    ) -> Turn:  # fmt: skip
        """Draw one reply. After an EngineAway another try may help, after other EngineErrors not."""
        policy = policy or self.policy
        if self.url in policy.refused:
            raise EngineAway(f"the engine at {self.url} is out of service")
        start = routes_start if self._routes else None
        wanted = WantedRoutes(routes_start, len(prompt), sampling.max_tokens)
        version, dialect = policy.version, self._dialect
        salt = str(version) if self._rules.knows_versions else ""
        body = dialect.encode_request(self.model, prompt, sampling, stop_ids, start, salt)
        limit = self._rules.most_bytes(len(prompt) + sampling.max_tokens)
        try:
            drawn, routes = await self._draw(body, policy, wanted, limit)
        except EngineError as error:
            if error.status == NOT_FOUND:
                raise EngineError(f"{error}. {NO_TOKENS}", status=NOT_FOUND) from None
            raise
        if self._routes and routes is None:
            raise EngineError(
                f"the reply of {self.url} has no routes: "
                "start vLLM or SGLang with --enable-return-routed-experts, "
                "or set engine.routes = false to train without them"
            )
        await self._check(drawn, routes, max(version, policy.version))
        versions = drawn.versions
        if versions is None:
            versions = np.empty(len(drawn.token_ids), np.int32)
            versions.fill(version)
        return Turn(
            prompt_ids=prompt.ids,
            completion_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            versions=versions,
            temperature=sampling.temperature,
            finish_reason=drawn.finish_reason,
            routes=routes if self._routes else None,
            routes_start=start or 0,
            engine=self.url,
        )

    async def _draw(
        self, body: bytes, policy: ExpectedPolicy, wanted: WantedRoutes, limit: int
    ) -> Drawn:
        """Send a request and read its reply, of at most `limit` bytes."""

        async def read(reply: HttpReply) -> Drawn:
            head = reply.head
            if (head.length or 0) > limit:
                raise EngineError(f"its reply has {head.length} bytes, of at most {limit}")
            is_binary = head.headers.get("content-type") == SAFETENSORS
            read_body = self._read_binary if is_binary else self._read_json
            if head.length is not None and head.length <= INLINE_BODY_BYTES:
                return await read_body(reply, BodyBuffer(head.length), wanted, limit)
            async with self._buffers.borrow(head.length or 0) as buffer:
                return await read_body(reply, buffer, wanted, limit)

        check = partial(self._check_connection, policy)
        return await self._link.post(self._dialect.path, body, ACCEPT, read, check, policy)

    def drop_requests(self, policy: ExpectedPolicy) -> None:
        """Give up the requests that were made under this policy."""
        self._link.drop_requests(policy)

    async def _check(self, drawn: ReplyColumns, routes: Routes | None, newest: int) -> None:
        self._rules.check_columns(drawn, newest)
        if routes is None or not routes.size:
            return
        if routes.nbytes <= INLINE_ROUTES_BYTES:
            highest = np.maximum.reduce(routes, axis=None)
        else:
            highest = await thread_to_the_end(routes.max)
        self._rules.check_routes(routes, int(highest))

    async def _check_connection(self, policy: ExpectedPolicy, connection: Connection) -> None:
        """Raise EngineAway if the process at the other end has an older version than `policy`: it was
        started again from old weights, or missed an update. A connection ends with its process, so each
        connection is asked once for each version."""
        version, call = policy.version, self._dialect.weight_version
        if not self._rules.knows_versions or not self._reports_version:
            return
        if connection.checked_version >= version:
            return
        reply, body = await self._link.fetch_on(connection, call)
        status = reply.head.status
        if status not in (200, 404):  # it knows the path, and may answer later
            text = f"{self.url}{call.path}: {describe_error(status, body)}"
            raise EngineAway(text, status=status)
        reported = parse_version(body) if status == 200 else ""
        # where a server closes its connections after each answer, no request can follow the check
        self._reports_version = bool(reported) and not reply.head.closes
        if reported and not is_at_least(reported, version):
            raise EngineAway(
                f"the engine at {self.url} has version '{reported}', not {version} yet"
            )
        connection.checked_version = version

    async def _read_binary(
        self, reply: HttpReply, buffer: BodyBuffer, wanted: WantedRoutes, limit: int
    ) -> Drawn:
        await reply.read(bounded(buffer.add, limit))
        args = buffer, wanted if self._routes else None
        if buffer.length <= INLINE_ROUTES_BYTES:
            return decode_reply(*args)
        return await thread_to_the_end(decode_reply, *args)

    async def _read_json(
        self, reply: HttpReply, buffer: BodyBuffer, wanted: WantedRoutes, limit: int
    ) -> Drawn:
        dialect = self._dialect
        cutter = BodyCutter(
            buffer, lambda key, bulk: dialect.unneeded_chars(key, bulk, wanted)
        )
        await reply.read(bounded(cutter.feed, limit), cutter)
        try:
            if self._long_replies is None or len(cutter.rest) <= INLINE_JSON_BYTES:
                drawn = dialect.parse_columns(cutter.rest)
            else:
                drawn = await self._long_replies.parse_columns(dialect.name, cutter.rest)
        except EngineError as error:
            kind = reply.head.headers.get("content-type", JSON)
            if kind.startswith(JSON):
                raise
            raise EngineError(
                f"{error}. It is {kind!r}: {self.url} may be another server than an engine"
            ) from None
        if not self._routes:
            return drawn, None
        args = cutter.bulks, wanted, len(drawn.token_ids)
        if buffer.length <= INLINE_ROUTES_BYTES:
            return drawn, dialect.decode_routes(*args)
        return drawn, await thread_to_the_end(dialect.decode_routes, *args)


@asynccontextmanager
async def open_engine(
    access: EngineAccess, rules: ReplyRules, long_replies: LongReplies | None = None
) -> AsyncIterator[Engine]:  # fmt: skip
    """Open an engine that answers and serves the model of `access`."""
    with open_link(access) as link:
        served = await link.fetch_model()
        dialect = pick_dialect(served, rules.shape)
        yield Engine(link, served, dialect, BodyBuffers(), long_replies, rules)
