"""The engines of a run: each is looked at once a second, and all are given the newest weights."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct

from ...config.specs import OrchestratorSpec
from ...errors import EngineAway, EngineError, EngineLate
from ...inference.engines.control import EngineControl, open_control
from ...inference.engines.pool import check_alike
from ...inference.engines.status import all_of, is_at
from ...records.engine import EngineLoad
from ...records.ids import PolicyVersion
from ...records.situation import EngineState

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

Say = Callable[[str], Awaitable[None]]


class WantedWeights(Struct, frozen=True):
    """A version, and the folder it lies in."""

    version: PolicyVersion
    path: str


class _FleetEngine:
    """One engine, and what is known of it."""

    def __init__(self, open_control: EngineControl, version: PolicyVersion, *, must_load: bool) -> None:
        self.control = open_control
        self.version = version
        """The one it was given last; what it has, if it does not say."""
        self.must_load = must_load
        """Whether what it says of its version does not count."""
        self.is_mute = False
        """Whether it does not say which version it has."""
        self.updating = asyncio.Lock()
        self.heard_s = time.monotonic()
        self.trouble = ""
        """Why it does not answer; empty while it does."""
        self.load: EngineLoad | None = None

    @property
    def url(self) -> str:
        return self.control.url

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard_s if self.trouble else 0.0

    def state(self) -> EngineState:
        return EngineState(self.url, self.version, self.silent_s, self.trouble, self.load)


class EngineFleet:
    """Keeps every engine at the wanted version: the newest, once `update` was told of it."""

    def __init__(
        self, controls: Sequence[EngineControl], wanted: WantedWeights, patience_s: float, say: Say,
        is_needed: Callable[[], bool], *, must_push: bool,
    ) -> None:  # fmt: skip
        """`is_needed` says whether the run still has something to draw."""
        self._kept = [_FleetEngine(one, wanted.version, must_load=must_push) for one in controls]
        self._wanted = wanted
        self._patience_s = patience_s
        self._say = say
        self._is_needed = is_needed
        self._changed = asyncio.Condition()
        self._told: set[str] = set()

    @property
    def load(self) -> EngineLoad | None:
        """Of all that answer and say how busy they are."""
        return all_of([one.load for one in self._kept if one.load is not None and not one.trouble])

    def states(self) -> tuple[EngineState, ...]:
        return tuple(one.state() for one in self._kept)

    async def begin(self) -> None:
        """Give the first weights to engines that do not have them; one that is away is an error."""
        for one in self._kept:
            await self._bring(one)

    async def update(self, version: PolicyVersion, path: str) -> None:
        """Until every engine that answers has this version, and at least one does, if one is needed."""
        self._wanted = WantedWeights(version, path)
        async with asyncio.TaskGroup() as tasks:
            for one in self._kept:
                if not one.trouble:
                    tasks.create_task(self._look_after(one))
        async with self._changed:
            await self._changed.wait_for(self._can_go_on)

    def _can_go_on(self) -> bool:
        version = self._wanted.version
        ready = [one for one in self._kept if one.version >= version and not one.must_load]
        return any(not one.trouble for one in ready) or not self._is_needed()

    async def watch(self) -> None:
        """For ever: hear how every engine does, and give those that come back what they missed."""
        async with asyncio.TaskGroup() as tasks:
            for one in self._kept:
                tasks.create_task(self._watch(one), name=one.url)

    async def _watch(self, one: _FleetEngine) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if not one.updating.locked():
                await self._look_after(one)

    async def _look_after(self, one: _FleetEngine) -> None:
        """One look: is it there, how busy is it, has it the right weights?"""
        try:
            one.load = await one.control.load()
            await self._bring(one)
        except (EngineAway, EngineLate) as error:
            await self._is_away(one, str(error).removeprefix(one.url))
        else:
            await self._is_there(one)
        async with self._changed:
            self._changed.notify_all()

    async def _bring(self, one: _FleetEngine) -> None:
        """Give an engine the wanted weights unless it has them, and see that it does."""
        async with one.updating:
            wanted = self._wanted
            said = await one.control.weight_version()
            one.is_mute = not said
            if not one.must_load and is_at(said or str(one.version), wanted.version):
                one.version = wanted.version
                return
            one.must_load = True
            try:
                await self._load(one, wanted)
            except (EngineAway, EngineLate):
                raise
            except EngineError:
                if self._wanted is wanted:
                    raise
                return  # there is a newer version, and this one may be gone from the disk
            one.version, one.must_load = wanted.version, False

    async def _load(self, one: _FleetEngine, wanted: WantedWeights) -> None:
        await one.control.update_weights(wanted.path, wanted.version)
        said = await one.control.weight_version()
        if not said:
            await self._tell_that_mute(one)
        elif not is_at(said, wanted.version):
            raise EngineError(
                f"the engine at {one.url} was given version {wanted.version} and says that it has "
                f"'{said}': it does not load what it is given, or somebody else gives it weights too"
            )

    async def _tell_that_mute(self, one: _FleetEngine) -> None:
        """Once for each engine."""
        text = f"The engine at {one.url} does not say which weights it has: that it loads those it is "
        text += "given is believed, not checked"
        if text not in self._told:
            self._told.add(text)
            await self._say(text)

    async def _is_there(self, one: _FleetEngine) -> None:
        silent_s, one.trouble = one.silent_s, ""
        one.heard_s = time.monotonic()
        if silent_s:
            await self._say(f"The engine at {one.url} is back after {silent_s:.0f} s, at version "
                            f"{one.version}")  # fmt: skip
        if one.load is None and one.url not in self._told:
            self._told.add(one.url)
            log.warning("the engine at %s does not say how busy it is", one.url)

    async def _is_away(self, one: _FleetEngine, trouble: str) -> None:
        was_there, one.trouble = not one.trouble, trouble
        one.must_load |= one.is_mute and one.version > 0  # it may be another process that comes back
        if was_there:
            others = [other for other in self._kept if not other.trouble]
            then = "the others take its rollouts" if others else "rollouts wait for it"
            await self._say(f"No answer from the engine at {one.url} ({trouble}); {then}")
        shortest_s = min(other.silent_s for other in self._kept)
        if shortest_s >= self._patience_s and self._is_needed():
            raise EngineError(self._nobody_answers())

    def _nobody_answers(self) -> str:
        if len(self._kept) == 1:
            (one,) = self._kept
            who = f"no answer from the engine at {one.url} for {one.silent_s:.0f} s ({one.trouble})"
        else:
            each = "; ".join(f"{one.url} for {one.silent_s:.0f} s, {one.trouble}" for one in self._kept)
            who = f"none of the {len(self._kept)} engines answers ({each})"
        return (
            f"{who}, and engine.patience_s is {self._patience_s:g}: start it again, then --resume goes "
            "on from here"
        )


@asynccontextmanager
async def open_fleet(
    part: OrchestratorSpec, say: Say, is_needed: Callable[[], bool]
) -> AsyncIterator[EngineFleet]:
    """The run's engines, all there, alike, and with the weights the run goes on from."""
    wants = part.engine
    key = os.environ.get(wants.key_var, "")
    async with AsyncExitStack() as stack:
        controls = [
            await stack.enter_async_context(
                open_control(url, model=wants.model, key=key, deadline_s=wants.request_deadline_s)
            )
            for url in part.engine_urls
        ]
        check_alike([(one.url, one.served) for one in controls])
        first = WantedWeights(PolicyVersion(part.first_step - 1), part.weights)
        fleet = EngineFleet(controls, first, wants.patience_s, say, is_needed, must_push=part.must_push)
        await fleet.begin()
        yield fleet
