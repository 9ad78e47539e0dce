"""The engines of a run: each is checked once a second, and all are given the newest weights."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

from ...config.specs import OrchestratorSpec
from ...errors import EngineAway, EngineError, EngineLate
from ...inference.engines.control import EngineControl, open_control
from ...inference.engines.link import EngineAccess
from ...inference.engines.pool import check_same_model
from ...inference.engines.status import is_version, sum_loads
from ...records.engine import EngineLoad
from ...records.ids import PolicyVersion
from ...records.situation import EngineState
from ..core.commands import UpdateWeights

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

Say = Callable[[str], Awaitable[None]]


class _FleetEngine:
    def __init__(
        self, control: EngineControl, version: PolicyVersion, *, must_load: bool
    ) -> None:
        self.control = control
        self.url = control.url
        self.version = version
        """The version it was given last. If the engine reports none, this is what it has."""
        self.must_load = must_load
        """Load the wanted weights whatever version the engine reports."""
        self.reports_version = True
        self.updating = asyncio.Lock()
        self.heard_s = monotonic()
        self.trouble = ""
        """Why it does not answer; empty while it does."""
        self.load: EngineLoad | None = None

    @property
    def silent_s(self) -> float:
        return monotonic() - self.heard_s if self.trouble else 0.0


class EngineFleet:
    """Keeps every engine at the wanted version, which is the newest that `update` was called with."""

    def __init__(
        self,
        spec: OrchestratorSpec,
        controls: Sequence[EngineControl],
        say: Say,
        is_needed: Callable[[], bool],
        look_every_s: float,
    ) -> None:
        """`is_needed` returns whether the run still has something to sample."""
        version, must_load = PolicyVersion(spec.first_step - 1), spec.must_push
        self._engines = [
            _FleetEngine(control, version, must_load=must_load) for control in controls
        ]
        self._wanted = UpdateWeights(version, spec.weights)
        self._patience_s = spec.engine.patience_s
        self._say = say
        self._is_needed = is_needed
        self._look_every_s = look_every_s
        self._changed = asyncio.Condition()
        self._said: set[str] = set()

    @property
    def load(self) -> EngineLoad | None:
        answering = [engine for engine in self._engines if not engine.trouble]
        return sum_loads([engine.load for engine in answering if engine.load is not None])

    def states(self) -> tuple[EngineState, ...]:
        return tuple(
            EngineState(
                engine.url, engine.version, engine.silent_s, engine.trouble, engine.load
            )
            for engine in self._engines
        )

    async def begin(self) -> None:
        """Load the first weights into engines that lack them. All engines must answer."""
        for engine in self._engines:
            await self._bring_up_to_date(engine)

    async def update(self, wanted: UpdateWeights) -> None:
        """Wait until every engine that answers has this version, and one at least if one is needed."""
        self._wanted = wanted
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                if not engine.trouble:
                    tasks.create_task(self._look_after(engine))
        async with self._changed:
            await self._changed.wait_for(self._can_continue)

    def _can_continue(self) -> bool:
        version = self._wanted.version
        newest = [engine for engine in self._engines if engine.version >= version]
        is_ready = any(not engine.must_load and not engine.trouble for engine in newest)
        return is_ready or not self._is_needed()

    async def watch(self) -> None:
        """Check every engine forever, and load into those that come back what they missed."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(self._watch(engine), name=engine.url)

    async def _watch(self, engine: _FleetEngine) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            if not engine.updating.locked():
                await self._look_after(engine)

    async def _look_after(self, engine: _FleetEngine) -> None:
        """Check one engine: does it answer, how busy is it, does it have the right weights?"""
        try:
            engine.load = await engine.control.load()
            await self._bring_up_to_date(engine)
        except (EngineAway, EngineLate) as error:
            await self._note_silence(engine, str(error).removeprefix(engine.url))
        else:
            await self._note_answer(engine)
        async with self._changed:
            self._changed.notify_all()

    async def _bring_up_to_date(self, engine: _FleetEngine) -> None:
        async with engine.updating:
            wanted = self._wanted
            reported = await engine.control.weight_version()
            engine.reports_version = bool(reported)
            if not engine.must_load and is_version(
                reported or str(engine.version), wanted.version
            ):
                engine.version = wanted.version
                return
            engine.must_load = True
            try:
                await self._load(engine, wanted)
            except (EngineAway, EngineLate):
                raise
            except EngineError:
                if self._wanted is wanted:
                    raise
                return  # there is a newer version, and this one may be gone from the disk
            engine.version, engine.must_load = wanted.version, False

    async def _load(self, engine: _FleetEngine, wanted: UpdateWeights) -> None:
        await engine.control.update_weights(wanted.path, wanted.version)
        reported = await engine.control.weight_version()
        if not reported:
            text = (
                f"The engine at {engine.url} does not report which weights it has, so rollway cannot "
                "check that it loads the weights it is given"
            )
            if text not in self._said:
                self._said.add(text)
                await self._say(text)
        elif not is_version(reported, wanted.version):
            raise EngineError(
                f"the engine at {engine.url} was given version {wanted.version} and reports "
                f"'{reported}': it does not load what it is given, or something else gives it "
                "weights too"
            )

    async def _note_answer(self, engine: _FleetEngine) -> None:
        silent_s, engine.trouble = engine.silent_s, ""
        engine.heard_s = monotonic()
        if silent_s:
            await self._say(
                f"The engine at {engine.url} is back after {silent_s:.0f} s, at version {engine.version}"
            )
        if engine.load is None and engine.url not in self._said:
            self._said.add(engine.url)
            log.warning("the engine at %s does not report how busy it is", engine.url)

    async def _note_silence(self, engine: _FleetEngine, trouble: str) -> None:
        was_answering, engine.trouble = not engine.trouble, trouble
        if not engine.reports_version and engine.version > 0:
            # another process may come back, with the weights it was started from
            engine.must_load = True
        if was_answering:
            others = [other for other in self._engines if not other.trouble]
            effect = "the others take its rollouts" if others else "rollouts wait for it"
            await self._say(
                f"No answer from the engine at {engine.url} ({trouble}); {effect}"
            )
        shortest_s = min(other.silent_s for other in self._engines)
        if shortest_s >= self._patience_s and self._is_needed():
            raise EngineError(self._no_engine_answers())

    def _no_engine_answers(self) -> str:
        silences = [
            f"{engine.url} for {engine.silent_s:.0f} s ({engine.trouble})"
            for engine in self._engines
        ]
        summary = f"no answer from the engine at {silences[0]}"
        if len(silences) > 1:
            summary = f"none of the {len(silences)} engines answers: {'; '.join(silences)}"
        return (
            f"{summary}, and engine.patience_s is {self._patience_s:g}: start it again, then "
            "--resume continues from here"
        )


@asynccontextmanager
async def open_fleet(
    spec: OrchestratorSpec,
    say: Say,
    is_needed: Callable[[], bool],
    look_every_s: float = LOOK_EVERY_S,
) -> AsyncIterator[EngineFleet]:
    """Connect to the engines. All must answer, serve one model, and load the run's first weights."""
    config, controls = spec.engine, []
    key = os.environ.get(config.key_var or "", "")
    async with AsyncExitStack() as stack:
        for url in spec.engine_urls:
            access = EngineAccess(url, config.request_deadline_s, config.model or "", key)
            controls.append(await stack.enter_async_context(open_control(access)))
        check_same_model([(control.url, control.served) for control in controls])
        fleet = EngineFleet(spec, controls, say, is_needed, look_every_s)
        await fleet.begin()
        yield fleet
