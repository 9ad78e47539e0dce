"""One rollout while it runs in a worker: its phase, its turns, its rows and how it may end."""

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from ...envs.environment import Environment
from ...envs.rollout import Reply, Rollout
from ...loop.bounded_code import BoundedCode
from ...payload.spool import Spool
from ...records.rollout import Failed, Timing
from ...trace.trace import Trace
from ...wire.messages import Phase, RolloutProgress, Run

log = logging.getLogger(__name__)

MAX_REPORTED = 256
"""One RolloutPhases reports at most this many rollouts that are longest in their phase, and this many
whose routes have grown most since they were reported."""
LEAST_GROWTH = 1 << 20


class LiveRollout:
    """The state of one running rollout. An engine that answers with messages leaves the trace empty."""

    def __init__(self, run: Run, spool: Spool | None = None) -> None:
        self.run = run
        self.spool = spool
        self._is_spooling = False
        self.told_bytes = 0
        """Bytes of routes at the last report."""
        self.phase: Phase = "starting"
        self.since_s = time.monotonic()
        """When the current phase began."""
        self.num_turns = 0
        self.num_tokens = 0
        """Tokens that the policy sampled, children included."""
        self.engine_s = 0.0
        self.versions: list[int] = []
        """The oldest and the newest version that drew tokens of each turn."""
        self.engines: dict[str, None] = {}
        """The engines that drew its turns, in order."""
        self.trace = Trace()
        self.finish_reason = "no turn"
        """How the last turn ended."""
        self.stopped_by = ""
        """The stop condition or limit that ended the rollout, if one did."""
        self.overrun = ""
        """How long the prompt was that did not fit the context window, if one did not."""
        self.cancel_reason: str | None = None
        self.code: BoundedCode[Finished | Failed] | None = None
        """The task in which the environment's code runs. None before the rollout has begun."""
        self.cancel_running: Callable[[], object] | None = None
        """Cancels what runs now. None before the rollout has begun and after it has ended."""

    @property
    def stop(self) -> str:
        return self.stopped_by or self.finish_reason

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since_s = time.monotonic()

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Stay in a phase for the length of the block, then return to the phase before it. Children
        that run at the same time may be in this phase already. The block then ends in `env`: to
        return to this phase would leave the rollout in it forever."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before if before != phase else "env")

    def count(self, reply: Reply, engine_s: float) -> None:
        """Count one turn of the policy, which took the engine `engine_s`."""
        self.num_turns += 1
        self.num_tokens += reply.num_tokens
        self.engine_s += engine_s
        self.finish_reason = reply.finish_reason

    def limit_reached(self, env: Environment) -> str:
        """Return the name of the environment's limit that this rollout has reached, or ""."""
        if env.max_turns is not None and self.num_turns >= env.max_turns:
            return "max_turns"
        if env.max_rollout_tokens is not None and self.num_tokens >= env.max_rollout_tokens:
            return "max_rollout_tokens"
        return ""

    def cancel(self, reason: str) -> None:
        """Cancel the rollout. One that has not begun finds the reason when it does."""
        self.cancel_reason = reason
        if self.cancel_running is not None:
            self.cancel_running()

    def aside(self) -> "LiveRollout":
        """Return the state of a conversation that is recorded nowhere, by code of the same rollout."""
        aside = LiveRollout(self.run)
        aside.code = self.code
        return aside

    @property
    def growth(self) -> int:
        """Bytes of routes that no report has counted yet."""
        return self.num_route_bytes - self.told_bytes

    @property
    def num_route_bytes(self) -> int:
        return self.trace.num_loose_bytes + (self.spool.num_bytes if self.spool else 0)

    async def spool_routes(self) -> None:
        """Move routes from memory to the spool if they are many. Children may ask at the same time."""
        trace, spool = self.trace, self.spool
        if spool is None or trace.num_loose_bytes < spool.least_bytes or self._is_spooling:
            return
        self._is_spooling = True
        try:
            chunks = trace.loose_routes()
            trace.spooled(chunks, await spool.append([chunk.in_memory for chunk in chunks]))
        except OSError as error:
            log.warning("routes of %s stay in memory: %s", self.run.rollout_id, error)
        finally:
            self._is_spooling = False

    async def stay_if_given_up(self) -> None:
        """Never return to code that was given up: its rollout has settled, and must not change."""
        if self.code is not None and self.code.is_given_up:
            await asyncio.get_running_loop().create_future()


class Finished(Struct, frozen=True):
    """A rollout that has ended and is scored. Its rows are still in memory, in its trace."""

    rollout: Rollout
    scores: dict[str, float]
    timing: Timing


def progress(rollouts: Iterable[LiveRollout]) -> tuple[RolloutProgress, ...]:
    """Report where rollouts are: those that are longest in their phase, and those that have grown."""
    now_s = time.monotonic()
    rollouts = list(rollouts)
    chosen = heapq.nsmallest(MAX_REPORTED, rollouts, key=lambda live: live.since_s)
    grown = [live for live in rollouts if live.growth >= LEAST_GROWTH]
    chosen += heapq.nlargest(MAX_REPORTED, grown, key=lambda live: live.growth)
    for live in chosen:
        live.told_bytes = live.num_route_bytes
    return tuple(
        RolloutProgress(
            live.run.rollout_id,
            live.phase,
            now_s - live.since_s,
            live.num_turns,
            live.num_tokens,
            live.told_bytes,
        )
        for live in dict.fromkeys(chosen)
    )
