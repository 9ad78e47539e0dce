"""Several engines with the same weights. A rollout keeps to one of them for as long as it answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct

from ...errors import EngineAway, EngineError
from ...records.turn import Sampling, Turn
from ..http.endpoint import ServedModel
from ..replies.body import BodyBuffers
from ..replies.long_replies import LongReplies
from ..replies.routes import RouteShape
from .engine import Engine
from .link import EngineLink, dialect_of, open_link
from .prompt import Prompt

FIRST_REST_S, LONGEST_REST_S = 0.25, 2.0
"""An engine that is away is not asked for so long, each time twice as long."""
MAX_LOST = 5
"""A request that so many engines went away with may be what they went away of."""


class _Member:
    """An engine, and whether it is worth asking now."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rests_until_s = 0.0
        self._rest_s = FIRST_REST_S

    def answered(self) -> None:
        self._rest_s = FIRST_REST_S

    def went_away(self) -> None:
        """Of all that find out at the same time, the first counts."""
        now_s = time.monotonic()
        if now_s >= self.rests_until_s:
            self.rests_until_s = now_s + self._rest_s
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)


class EnginePool:
    """The engines of a worker. `version` is the policy all of them are known to sample from."""

    def __init__(self, engines: Sequence[Engine], patience_s: float) -> None:
        self._members = [_Member(engine) for engine in engines]
        self.patience_s = patience_s

    @property
    def version(self) -> int:
        return self._members[0].engine.version

    @version.setter
    def version(self, version: int) -> None:
        for member in self._members:
            member.engine.version = version

    def seat(self, number: int) -> "PinnedEngine":
        """Equal numbers share an engine, and what it has cached; others are spread evenly."""
        return PinnedEngine(self, number % len(self._members))

    async def next_from(self, index: int) -> tuple[int, _Member]:
        """The engine at `index`, the next one if that rests, the first to wake if all do."""
        count = len(self._members)
        order = [(one % count, self._members[one % count]) for one in range(index, index + count)]
        now_s = time.monotonic()
        chosen = min(order, key=lambda one: max(now_s, one[1].rests_until_s))
        await asyncio.sleep(max(0.0, chosen[1].rests_until_s - now_s))
        return chosen


class PinnedEngine:
    """A rollout's place at one engine; at another when that one is away."""

    def __init__(self, pool: EnginePool, index: int) -> None:
        self._pool = pool
        self._index = index

    async def complete(
        self, prompt: Prompt, sampling: Sampling, stop_ids: list[int], routes_start: int
    ) -> Turn:
        """Draw one reply, at whichever engine is there, and wait for one if none is."""
        since_s: float | None = None
        num_lost = 0
        while True:
            self._index, member = await self._pool.next_from(self._index)
            try:
                turn = await member.engine.complete(prompt, sampling, stop_ids, routes_start)
            except EngineAway as error:
                member.went_away()
                since_s = since_s or time.monotonic()
                num_lost += error.was_asked
                waited_s = time.monotonic() - since_s
                if num_lost >= MAX_LOST:
                    raise EngineError(f"{error}; {num_lost} times with this request") from None
                if waited_s >= self._pool.patience_s:
                    raise EngineError(f"{error}; waited for {waited_s:.0f} s") from None
            else:
                member.answered()
                return turn


class PoolConfig(Struct, frozen=True, kw_only=True):
    """What a worker knows of its engines before it has met them."""

    urls: tuple[str, ...]
    model: str
    key: str
    routes: bool
    shape: RouteShape | None
    deadline_s: float
    patience_s: float


@asynccontextmanager
async def open_pool(
    wants: PoolConfig, long_replies: LongReplies | None, *, is_patient: bool
) -> AsyncIterator[EnginePool]:
    """The engines, which all serve the same model. With `is_patient` one that answers is waited for,
    and speaks for those that do not; else all must answer now."""
    async with AsyncExitStack() as stack:
        links = [
            await stack.enter_async_context(open_link(url, wants.key, wants.deadline_s))
            for url in wants.urls
        ]
        met = _first if is_patient else _all
        served = await met(links, wants)
        spools = BodyBuffers()
        engines = [
            Engine(
                link, served.id, dialect_of(served, wants.shape),
                routes=wants.routes, spools=spools, long_replies=long_replies,
            )
            for link in links
        ]  # fmt: skip
        yield EnginePool(engines, wants.patience_s)


async def _all(links: Sequence[EngineLink], wants: PoolConfig) -> ServedModel:
    served = [await link.served(wants.model) for link in links]
    check_alike([(link.url, one) for link, one in zip(links, served, strict=True)])
    return served[0]


async def _first(links: Sequence[EngineLink], wants: PoolConfig) -> ServedModel:
    """What the first engine that answers says."""
    until_s = time.monotonic() + wants.patience_s
    while True:
        for link in links:
            try:
                return await link.served(wants.model)
            except EngineAway as error:
                if time.monotonic() >= until_s:
                    raise EngineError(f"{error}; waited for {wants.patience_s:g} s") from None
        await asyncio.sleep(LONGEST_REST_S)


def check_alike(engines: Sequence[tuple[str, ServedModel]]) -> None:
    """Engines of one run are one policy: refuse those that do not serve the same model."""
    told = [(url, f"'{one.id}' like {dialect_of(one, None).name}") for url, one in engines]
    first_url, first = told[0]
    for url, other in told[1:]:
        if other != first:
            raise EngineError(
                f"the engine at {first_url} serves {first}, the one at {url} {other}: engines of one "
                "run serve one model, under one name (engine.model), and are of one kind"
            )
