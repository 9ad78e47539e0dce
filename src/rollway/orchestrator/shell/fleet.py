"""The engines of a run: each is checked once a second, given the newest weights, and verified."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

from msgspec.structs import replace

from ...config.specs import OrchestratorSpec
from ...errors import EngineAway, EngineError, EngineLate
from ...inference.engines.control import EngineControl, open_control
from ...inference.engines.link import EngineAccess
from ...inference.engines.pool import check_same_model
from ...inference.engines.status import sum_loads
from ...inference.engines.verdict import COARSEST, find_departing
from ...loop.lanes.threads import thread
from ...model.checkpoint import check_complete
from ...model.shape import read_shape
from ...records.engine import EngineLoad, fresh_kl_key
from ...records.ids import PolicyVersion, RolloutId
from ...records.probe import PROBE_FILE
from ...records.rollout import Failed, Scored, Settled
from ...records.situation import EngineState
from ...rundir.rundir import RunDir
from ..core.commands import UpdateWeights
from .fleet_engine import EngineNeeds, FleetEngine
from .verifier import Verdict, read_probe

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

Say = Callable[[str], Awaitable[None]]
Unsettled = Callable[[], Iterable[RolloutId]]


async def _ignore() -> None: ...


class EngineFleet:
    """Keeps every engine at the wanted version, which is the newest that `update` was called with. A run
    on chat endpoints, which take no weights, has a fleet without engines."""

    def __init__(
        self,
        spec: OrchestratorSpec,
        controls: Sequence[EngineControl],
        say: Say,
        is_needed: Callable[[], bool],
        look_every_s: float,
        *,
        has_experts: bool,
    ) -> None:
        """`is_needed` returns whether the run still has something to sample."""
        config = spec.engine
        self._needs = EngineNeeds(
            routes=has_experts if config.routes is None else config.routes,
            temperature=spec.sampling.temperature,
            unknown_dtype=config.local.dtype if config.is_embedded else COARSEST,
        )
        version, must_load = PolicyVersion(spec.first_step - 1), spec.must_push
        self._engines = [
            FleetEngine(control, version, must_load=must_load) for control in controls
        ]
        self._run = RunDir(spec.run_dir)
        self._wanted = UpdateWeights(version, spec.weights)
        self._tensors: frozenset[str] = frozenset()
        """The tensors of the version that was published last."""
        self._patience_s = config.patience_s
        self._verifies = config.verify
        self._say = say
        self._is_needed = is_needed
        self._look_every_s = look_every_s
        self._changed = asyncio.Condition()
        self._said: set[str] = set()
        self.verify_s: float | None = None
        """How long the last verification took. None if there was none."""
        self.unsettled: Unsettled = frozenset
        """Returns the rollouts that have not settled."""
        self.on_refused: Callable[[], Awaitable[None]] = _ignore
        """Called when `refused` changes."""

    def listen(self, unsettled: Unsettled, on_refused: Callable[[], Awaitable[None]]) -> None:
        """Connect the fleet with those who know what has not settled, and whom to tell of refusals."""
        self.unsettled, self.on_refused = unsettled, on_refused

    @property
    def load(self) -> EngineLoad | None:
        answering = [engine for engine in self._engines if not engine.trouble]
        return sum_loads([engine.load for engine in answering if engine.load is not None])

    @property
    def refused(self) -> tuple[str, ...]:
        """The engines that workers may not ask."""
        return tuple(engine.url for engine in self._engines if engine.refusal)

    def states(self) -> tuple[EngineState, ...]:
        return tuple(
            EngineState(
                engine.url,
                engine.version,
                engine.silent_s,
                engine.trouble or engine.refusal,
                engine.load,
            )
            for engine in self._engines
        )

    async def begin(self) -> None:
        """Verify all engines, which must all answer, and load the first weights into those that lack
        them."""
        for engine in self._engines:
            if problem := await engine.read_settings(self._needs):
                raise EngineError(
                    f"the engine at {engine.url} cannot be trained on: {problem}"
                )
        for engine in self._engines:
            await self._bring_up_to_date(engine)

    async def update(self, wanted: UpdateWeights) -> None:
        """Wait until every engine that answers has this version, and one at least if one is needed."""
        self._tensors = await thread(check_complete, Path(wanted.path), self._tensors)
        self._wanted = wanted
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                if not engine.trouble:
                    tasks.create_task(self._look_after(engine))
        async with self._changed:
            await self._changed.wait_for(self._can_continue)

    def _can_continue(self) -> bool:
        if not self._engines:
            return True
        version = self._wanted.version
        newest = [engine for engine in self._engines if engine.version >= version]
        return any(engine.is_in_service for engine in newest) or not self._is_needed()

    async def vet(self, settled: Settled) -> Settled:
        """Return a rollout's end once the engines that drew it are judged. If one of them had wrong
        weights while the rollout ran, or if a version that drew it is not of this run, the rollout has
        failed. If it does not name engines of this run, each of them may have drawn it."""
        outcome = settled.outcome
        if not isinstance(outcome, Scored):
            return settled
        if outcome.last_version > self._wanted.version:
            error = (
                f"its reply names version {outcome.last_version}, and the run has published version "
                f"{self._wanted.version} last: does another run use this engine?"
            )
            return replace(settled, outcome=Failed("engine", error))
        drew = [engine for engine in self._engines if engine.url in outcome.engines]
        is_known = 0 < len(drew) == len(outcome.engines)
        drew = drew if is_known else self._engines
        if not all(engine.is_judged for engine in drew):
            async with self._changed:
                await self._changed.wait_for(lambda: all(engine.is_judged for engine in drew))
        for engine in drew:
            if settled.rollout_id in engine.suspects:
                part = "drew" if is_known else "may have drawn"
                error = (
                    f"the engine at {engine.url}, which {part} it, was taken out of service"
                )
                return replace(settled, outcome=Failed("engine", error))
        return settled

    async def compare_kls(self, version: PolicyVersion, metrics: Mapping[str, float]) -> None:
        """Take an engine out of service whose fresh rows are far from the trainer's own figures, while
        those of the others are near. It is not given `version`, which was published with these figures;
        the one after gives it another chance."""
        in_service = {engine.url: engine for engine in self._engines if engine.is_in_service}
        kls = {url: metrics.get(fresh_kl_key(url)) for url in in_service}
        found = find_departing({url: kl for url, kl in kls.items() if kl is not None})
        if found is not None:
            engine, why = in_service[found[0]], found[1]
            async with engine.updating:
                await self._refuse(engine, version, why)

    async def watch(self) -> None:
        """Check every engine forever, and load into those that come back what they missed."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(self._watch(engine), name=engine.url)

    async def _watch(self, engine: FleetEngine) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            if not engine.updating.locked():
                await self._look_after(engine)

    async def _look_after(self, engine: FleetEngine) -> None:
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

    async def _bring_up_to_date(self, engine: FleetEngine) -> None:
        async with engine.updating:
            wanted = self._wanted
            reported = await engine.control.weight_version()
            engine.reports_version = bool(reported)
            has_it = (reported or str(engine.version)) == str(wanted.version)
            if engine.is_verified and not engine.must_load and has_it:
                engine.version = wanted.version
                return
            if engine.refusal and engine.version == wanted.version:
                return  # the next version gives it another chance
            try:
                await self._load_and_judge(engine, wanted)
            finally:
                engine.is_judged = True

    async def _load_and_judge(self, engine: FleetEngine, wanted: UpdateWeights) -> None:
        """Load a version, unless the engine was started with it, and verify it. Only an engine that
        passes is told its version, and workers ask none that has not been told."""
        version = wanted.version
        engine.is_judged = engine.is_verified = False
        try:
            problem = await engine.read_settings(self._needs) if engine.must_tell else ""
            if problem:
                await self._refuse(engine, version, problem)
                return
            if engine.must_load or version > 0:
                engine.must_load = True
                await engine.control.load_weights(wanted.path, version)
            verdict = await self._verify(engine, wanted)
            if verdict is None or not verdict.refusal:
                await engine.confirm(version)
        except (EngineAway, EngineLate):
            raise
        except EngineError as error:
            if self._wanted is wanted:
                await self._refuse(
                    engine, version, f"it cannot load version {version}: {error}"
                )
            return  # if there is a newer version, this one may be gone from the disk
        if verdict is not None and verdict.refusal:
            seen = f"{verdict.comparison}. Likely cause: {verdict.refusal}"
            await self._refuse(engine, version, f"at version {version} {seen}")
            return
        was_refused, engine.refusal = engine.refusal, ""
        engine.version, engine.must_load, engine.is_verified = version, False, True
        if was_refused:
            await self._say(
                f"The engine at {engine.url} is in service again, at version {version}"
            )
            await self.on_refused()

    async def _verify(self, engine: FleetEngine, wanted: UpdateWeights) -> Verdict | None:
        """Return the verdict about the engine's weights. None if the trainer wrote no probe, or if the
        run file does not want it."""
        if not self._verifies:
            return None
        folder = Path(wanted.path) if wanted.version else self._run.weights_of(wanted.version)
        probe = await read_probe(folder / PROBE_FILE)
        if probe is None:
            await self._say_once(
                "The trainer writes no probe beside its weights, so rollway cannot check that engines "
                "have them"
            )
            return None
        try:
            verdict = await engine.verifier.verify(wanted.version, probe)
        except (EngineAway, EngineLate):
            # it stays unknown which weights drew the tokens since the load
            engine.suspects = frozenset(self.unsettled())
            raise
        self.verify_s = verdict.seconds
        log.info("%s, version %d: %s", engine.url, wanted.version, verdict.comparison)
        return verdict

    async def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            await self._say(text)

    async def _refuse(self, engine: FleetEngine, version: PolicyVersion, why: str) -> None:
        """Take an engine out of service. What it drew since the load began does not train."""
        engine.refusal, engine.version, engine.must_load = why, version, True
        engine.suspects = frozenset(self.unsettled())
        text = f"The engine at {engine.url} is out of service: {why}"
        others = [other for other in self._engines if not other.refusal]
        if not others and self._is_needed():
            raise EngineError(f"{text[0].lower()}{text[1:]}; no other engine is left")
        await self._say(text)
        await self.on_refused()

    async def _note_answer(self, engine: FleetEngine) -> None:
        silent_s, engine.trouble = engine.silent_s, ""
        engine.heard_s = monotonic()
        if silent_s and not engine.refusal:
            await self._say(
                f"The engine at {engine.url} is back after {silent_s:.0f} s, at version {engine.version}"
            )
        if engine.load is None and engine.url not in self._said:
            self._said.add(engine.url)
            await self._say(
                f"The engine at {engine.url} does not report how busy it is: its /metrics cannot be read"
            )

    async def _note_silence(self, engine: FleetEngine, trouble: str) -> None:
        was_answering, engine.trouble = not engine.trouble, trouble
        engine.must_tell = True  # another process may come back, started in another way
        if not engine.reports_version:
            # another process may come back, with the weights it was started from
            engine.is_verified = False
            engine.must_load = engine.version > 0
        if was_answering:
            others = [
                other for other in self._engines if not (other.trouble or other.refusal)
            ]
            effect = "the others take its rollouts" if others else "rollouts wait for it"
            await self._say(
                f"No answer from the engine at {engine.url} ({trouble}); {effect}"
            )
        usable = [other for other in self._engines if not other.refusal] or self._engines
        shortest_s = min(other.silent_s for other in usable)
        if shortest_s >= self._patience_s and self._is_needed():
            raise EngineError(self._no_engine_answers())

    def _no_engine_answers(self) -> str:
        silences = [
            f"{engine.url} for {engine.silent_s:.0f} s ({engine.trouble or engine.refusal})"
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
    shape = read_shape(spec.model_path)
    async with AsyncExitStack() as stack:
        for url in spec.engine_urls:
            access = EngineAccess(url, config.request_deadline_s, config.model or "", key)
            controls.append(await stack.enter_async_context(open_control(access, shape)))
        check_same_model([(control.url, control.served) for control in controls])
        has_experts = shape is not None and shape.has_experts
        fleet = EngineFleet(
            spec, controls, say, is_needed, look_every_s, has_experts=has_experts
        )
        await fleet.begin()
        yield fleet
