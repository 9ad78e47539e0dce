"""Several engines with the same weights. A rollout stays with one of them as long as it answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

from msgspec import Struct

from ...errors import ConfigError, EngineAway, EngineError, EngineLate, ReplyAborted
from ...records.turn import Sampling, Turn
from ..http.endpoint import ServedModel
from ..replies.body import MAX_LARGE_BODIES, BodyBuffers
from ..replies.checks import ReplyRules
from ..replies.long_replies import LongReplies
from .dialect import Prompt
from .engine import Engine, ExpectedPolicy
from .link import EngineAccess, EngineLink, open_link, pick_dialect

FIRST_REST_S, LONGEST_REST_S = 0.25, 2.0
"""How long an engine that went away is left alone. Each time in a row doubles the pause, up to the
second number."""
MAX_LOST = 5
"""A request that was lost this many times, because the engine went away or aborted it, fails: it may be
the cause."""


class _Member:
    """An engine, and when the rollouts of one policy may ask it again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rests_until_s = 0.0
        self.asked_until_s = 0.0
        """Until when the engine itself asked to be left alone."""
        self.asked = ""
        """What it said then."""
        self.is_doubtful = False
        """It went away, and has not answered since."""
        self.num_asked = 0
        """Requests that it has not answered yet."""
        self._rest_s = FIRST_REST_S

    @property
    def is_tried(self) -> bool:
        """Whether one request finds out if it is back. If it is not, that request will wait long."""
        return self.is_doubtful and self.num_asked > 0

    def note_answer(self) -> None:
        self.is_doubtful = False
        self._rest_s = FIRST_REST_S

    def note_loss(self, error: EngineError) -> None:
        """Leave the engine alone for a while, or for as long as it asks. When many requests fail at
        once, only the first counts."""
        self.is_doubtful = True
        now_s = time.monotonic()
        asked_s = error.retry_after_s if isinstance(error, EngineAway) else None
        if asked_s is not None:
            if now_s + asked_s > self.asked_until_s:
                self.asked_until_s = now_s + asked_s
                self.asked = f"{error}; it asks to be left alone for {asked_s:g} s"
            self.rests_until_s = max(self.rests_until_s, self.asked_until_s)
        elif now_s >= self.rests_until_s:
            self.rests_until_s = now_s + self._rest_s
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)


class EnginePool:
    """The engines of a worker. `policy` is that of clients which have none of their own. Each policy has
    its own members: an engine that one client cannot use is not left alone by the others."""

    def __init__(
        self,
        engines: Sequence[Engine],
        policy: ExpectedPolicy,
        patience_s: float,
        max_context: int | None = None,
    ) -> None:
        self._engines = tuple(engines)
        self._members: dict[ExpectedPolicy, list[_Member]] = {}
        self.policy = policy
        self.patience_s = patience_s
        windows = [max_context or 0, *(engine.max_context for engine in engines)]
        self.max_context = min(filter(None, windows), default=0)
        for engine in engines:
            engine.policy = policy
        self.obey(policy)

    def obey(self, policy: ExpectedPolicy) -> None:
        """Give up this policy's requests to engines as soon as it refuses them. Their rollouts move to
        other engines."""

        def drop_refused() -> None:
            for engine in self._engines:
                if engine.url in policy.refused:
                    engine.drop_requests(policy)

        policy.on_refused = drop_refused

    def pin(self, number: int, policy: ExpectedPolicy | None = None) -> "PinnedEngine":
        """Choose an engine by number, for the rollout of a client with this policy. Rollouts with equal
        numbers share an engine and its prefix cache, and consecutive numbers are spread evenly."""
        return PinnedEngine(self, number % len(self._engines), policy or self.policy)

    async def wait_for_member(
        self, index: int, policy: ExpectedPolicy, until_s: float
    ) -> tuple[int, _Member]:
        """Return the member at `index`, or the next one that does not rest, and its index. If all rest,
        wait for the first that may be asked again, but not beyond `until_s`. Raise EngineError if that
        one asked to be left alone for longer. One that went away is asked by one request at a time until
        it answers, unless it is the only one."""
        members, now_s = self._members_for(policy), time.monotonic()
        pinned = members[index]
        if not pinned.is_doubtful and now_s >= pinned.rests_until_s and not policy.refused:
            return index, pinned  # nearly always
        order = [*range(index, len(members)), *range(index)]

        def reluctance(number: int) -> tuple[bool, bool, float]:
            member = members[number]
            is_refused = member.engine.url in policy.refused
            return is_refused, member.is_tried, max(now_s, member.rests_until_s)

        chosen = min(order, key=reluctance)
        member = members[chosen]
        if member.asked_until_s > until_s:
            raise EngineError(
                f"{member.asked}, and a request waits for an engine for at most {self.patience_s:g} s "
                "(engine.patience_s)"
            )
        if (rest_s := min(member.rests_until_s, until_s) - now_s) > 0:
            await asyncio.sleep(rest_s)
        return chosen, member

    def _members_for(self, policy: ExpectedPolicy) -> list[_Member]:
        if policy not in self._members:
            self._members[policy] = [_Member(engine) for engine in self._engines]
        return self._members[policy]


class PinnedEngine:
    """The engine of one rollout. When it goes away, the rollout moves to another one and stays there."""

    def __init__(self, pool: EnginePool, index: int, policy: ExpectedPolicy) -> None:
        self._pool = pool
        self._index = index
        self._policy = policy

    @property
    def max_context(self) -> int:
        return self._pool.max_context

    async def complete(
        self, prompt: Prompt, sampling: Sampling, stop_ids: list[int], routes_start: int
    ) -> Turn:
        """Draw one reply. If no engine answers, wait for one until the pool's patience ends."""
        patience_s = self._pool.patience_s
        since_s: float | None = None
        num_lost = 0
        while True:
            pause_began_s = time.monotonic()
            self._index, member = await self._pool.wait_for_member(
                self._index, self._policy, (since_s or pause_began_s) + patience_s
            )
            paused_s = time.monotonic() - pause_began_s
            member.num_asked += 1
            try:
                turn = await member.engine.complete(
                    prompt, sampling, stop_ids, routes_start, self._policy
                )
            except (EngineAway, ReplyAborted) as error:
                member.note_loss(error)
                since_s = since_s or time.monotonic() - paused_s
                if isinstance(error, ReplyAborted) or error.request_was_sent:
                    num_lost += 1
                waited_s = time.monotonic() - since_s
                if num_lost >= MAX_LOST:
                    message = f"{error}; this request was lost {num_lost} times"
                    raise EngineError(message) from None
                if waited_s >= patience_s:
                    raise _waited_too_long(error, waited_s) from None
            else:
                member.note_answer()
                return turn
            finally:
                member.num_asked -= 1


def _waited_too_long(error: EngineError, waited_s: float) -> EngineError:
    return EngineError(f"{error}; waited {waited_s:.1f} s for an engine (engine.patience_s)")


class PoolConfig(Struct, frozen=True, kw_only=True):
    engines: tuple[EngineAccess, ...]
    rules: ReplyRules
    patience_s: float
    """How long a request waits for an engine that answers."""
    max_context: int | None = None
    """The most tokens of a conversation, if that is less than the engines take."""


@asynccontextmanager
async def open_pool(
    config: PoolConfig,
    policy: ExpectedPolicy,
    long_replies: LongReplies | None,
    *,
    is_patient: bool,
) -> AsyncIterator[EnginePool]:
    """Open the engines, which must all serve the same model. With `is_patient` wait until one engine
    answers, and take the others to be like it. Otherwise all engines must answer now."""
    with ExitStack() as stack:
        links = [stack.enter_context(open_link(access)) for access in config.engines]
        if is_patient:
            served = await _wait_for_first(links, config.patience_s)
        else:
            models = [(link.url, await link.fetch_model()) for link in links]
            check_same_model(models)
            for url, listed in models:
                check_window(url, listed, config.max_context)
            served = models[0][1]
        dialect = pick_dialect(served, config.rules.shape)
        places = max(1, MAX_LARGE_BODIES // len(links))
        engines = [
            Engine(link, served, dialect, BodyBuffers(places), long_replies, config.rules)
            for link in links
        ]
        yield EnginePool(engines, policy, config.patience_s, config.max_context)


async def _wait_for_first(links: Sequence[EngineLink], patience_s: float) -> ServedModel:
    until_s = time.monotonic() + patience_s
    while True:
        for link in links:
            try:
                return await link.fetch_model()
            except (EngineAway, EngineLate) as error:
                if time.monotonic() >= until_s:
                    raise _waited_too_long(error, patience_s) from None
        await asyncio.sleep(LONGEST_REST_S)


def check_window(url: str, served: ServedModel, max_context: int | None) -> None:
    """Raise ConfigError if the run file promises longer conversations than an engine takes."""
    window = served.max_model_len
    if max_context and window and max_context > window:
        raise ConfigError(
            f"engine.max_context is {max_context}, but the engine at {url} takes {window} tokens: lower "
            "the key, or start the engine with a larger window (vLLM: --max-model-len, SGLang: "
            "--context-length)"
        )


def check_same_model(engines: Sequence[tuple[str, ServedModel]]) -> None:
    """Raise EngineError unless all engines serve the same model: together they are one policy."""
    served = [
        (url, f"'{model.id}' like {pick_dialect(model, None).name}") for url, model in engines
    ]
    for url, other in served[1:]:
        first_url, first = served[0]
        if other != first:
            raise EngineError(
                f"the engine at {first_url} serves {first}, the one at {url} {other}: all engines of a "
                "run must be of one kind and serve one model under one name (engine.external.model)"
            )
