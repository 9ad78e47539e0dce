"""The engines of a run as the orchestrator keeps them: real servers that refuse, vanish and return."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.doubles.versioned import VersionedEngine, versioned_engine

from rollway.config.sections import EngineConfig, OrchestratorConfig, PayloadConfig, WatchConfig
from rollway.config.specs import OrchestratorSpec
from rollway.errors import EngineError
from rollway.inference.engines.control import ANSWER_S
from rollway.loop.processes.part import first_cause
from rollway.orchestrator.shell.fleet import EngineFleet, open_fleet
from rollway.orchestrator.shell.sources import Events, from_engines
from rollway.records.engine import EngineLoad
from rollway.records.ids import PolicyVersion, Step
from rollway.records.turn import Sampling

pytestmark = pytest.mark.anyio

LOADED = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]


class Kept:
    """A fleet that is watched, and what it said."""

    def __init__(self, fleet: EngineFleet, said: list[str]) -> None:
        self.fleet = fleet
        self.said = said

    async def update(self, version: int) -> None:
        await self.fleet.update(PolicyVersion(version), f"/weights/step_{version}")


def part(
    engines: tuple[VersionedEngine, ...], first_step: int, patience_s: float, *, must_push: bool
) -> OrchestratorSpec:
    return OrchestratorSpec(
        orchestrator=OrchestratorConfig(), sampling=Sampling(8), envs=(),
        engine_urls=tuple(engine.url for engine in engines),
        engine=EngineConfig(patience_s=patience_s, request_deadline_s=5.0),
        weights="/weights/first", must_push=must_push, micro_batch_tokens=1, payload=PayloadConfig(),
        max_outstanding=1, max_steps=9, first_step=Step(first_step), run_dir="", watch=WatchConfig(),
    )  # fmt: skip


@asynccontextmanager
async def keeping(
    *engines: VersionedEngine, first_step: int = 1, patience_s: float = 60.0, must_push: bool = False,
    is_needed: Callable[[], bool] = lambda: True,
) -> AsyncIterator[Kept]:  # fmt: skip
    said: list[str] = []

    async def say(text: str) -> None:
        said.append(text)

    wanted = part(engines, first_step, patience_s, must_push=must_push)
    async with open_fleet(wanted, say, is_needed) as fleet, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(fleet.watch())
        yield Kept(fleet, said)
        watching.cancel()


def controls(engine: VersionedEngine) -> list[str]:
    return [path for path in engine.calls if path != "/weight_info"]


async def test_new_weights_go_to_every_engine_and_are_seen_there() -> None:
    async with versioned_engine() as a, versioned_engine() as b, keeping(a, b) as kept:
        assert (controls(a), controls(b)) == ([], []), "they were started with version 0"
        await kept.update(1)
        assert (a.version, b.version) == ("1", "1")
        assert [state.version for state in kept.fleet.states()] == [1, 1]
        assert kept.said == []
    for engine in (a, b):
        assert controls(engine) == LOADED
        resumed = engine.calls.index("/resume")
        assert "/weight_info" in engine.calls[resumed:], "it was asked what it has now"


async def test_an_engine_that_reports_the_wrong_version_is_named() -> None:
    async with versioned_engine() as good, versioned_engine(is_deaf=True) as deaf:
        with pytest.raises(BaseExceptionGroup) as raised:
            async with keeping(good, deaf) as kept:
                await kept.update(1)
    error = first_cause(raised.value)
    assert isinstance(error, EngineError)
    assert f"the engine at {deaf.url} was given version 1 and says that it has 'default'" in str(error)


async def test_one_that_cannot_report_is_spoken_of_once() -> None:
    async with versioned_engine(is_mute=True) as engine, keeping(engine) as kept:
        for version in (1, 2):
            await kept.update(version)
        assert engine.version == "2"
        (said,) = kept.said
    assert said.startswith(f"The engine at {engine.url} does not say which weights it has")


@pytest.mark.parametrize(("has", "must_push"), [("7", False), ("3", True), ("default", False)])
async def test_engines_begin_with_the_weights_of_the_run(has: str, must_push: bool) -> None:
    """Another run's version may have the same number."""
    async with versioned_engine() as engine:
        engine.version = has
        async with keeping(engine, first_step=4, must_push=must_push):
            assert controls(engine) == LOADED
            assert engine.version == "3"


async def test_an_engine_started_again_is_given_what_it_missed() -> None:
    async with versioned_engine() as a, versioned_engine() as b, keeping(a, b) as kept:
        await kept.update(1)
        await b.stop()
        await kept.update(2)
        assert a.version == "2", "the others are not held up"
        await b.start()
        await b.until(lambda: b.version == "2")
        await a.stop()
        await a.start()  # before anybody could notice that it was gone
        await a.until(lambda: a.version == "2")
        await a.until(lambda: controls(a) == 3 * LOADED)
        await b.until(lambda: controls(b) == 2 * LOADED)
    assert kept.said[0].startswith(f"No answer from the engine at {b.url} (")
    assert "; the others take its rollouts" in kept.said[0]
    assert any(text.startswith(f"The engine at {b.url} is back after ") for text in kept.said)


async def test_an_update_waits_for_an_engine_that_can_take_it() -> None:
    async with versioned_engine() as engine, keeping(engine) as kept:
        await engine.stop()
        updating = asyncio.create_task(kept.update(1))
        await asyncio.sleep(0.2)
        assert not updating.done()
        await engine.start()
        await updating
        assert engine.version == "1"


async def test_an_engine_that_hangs_is_away_until_it_answers_again() -> None:
    async with versioned_engine() as engine, keeping(engine) as kept:
        engine.awake.clear()
        while not kept.fleet.states()[0].trouble:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        (state,) = kept.fleet.states()
        assert state.trouble == f"/metrics did not answer within {ANSWER_S:g} s"
        assert state.silent_s >= ANSWER_S
        updating = asyncio.create_task(kept.update(1))
        engine.awake.set()
        await updating
        assert engine.version == "1"
        assert not kept.fleet.states()[0].trouble


async def test_a_mute_engine_that_comes_back_is_given_weights_whatever_it_has() -> None:
    async with versioned_engine(is_mute=True) as engine, keeping(engine) as kept:
        await kept.update(1)
        await engine.stop()
        while not kept.fleet.states()[0].trouble:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await engine.start()
        await engine.until(lambda: engine.version == "1")


async def test_the_run_stops_when_none_came_back_in_time() -> None:
    async def run(a: VersionedEngine, b: VersionedEngine) -> None:
        async with keeping(a, b, patience_s=1.5):
            await a.stop()
            await asyncio.sleep(2.5)
            await b.stop()  # one engine is enough: only now does the run wait
            await asyncio.sleep(30)

    async with versioned_engine() as a, versioned_engine() as b:
        with pytest.raises(BaseExceptionGroup) as raised:
            await run(a, b)
    text = str(first_cause(raised.value))
    assert text.startswith(f"none of the 2 engines answers ({a.url} for ")
    assert b.url in text
    assert "engine.patience_s is 1.5" in text
    assert "--resume goes on" in text


async def test_a_run_that_has_drawn_all_it_needs_waits_for_no_engine() -> None:
    needed = True
    async with (
        versioned_engine() as engine,
        keeping(engine, patience_s=0.5, is_needed=lambda: needed) as kept,
    ):
        await engine.stop()
        updating = asyncio.create_task(kept.update(1))
        await asyncio.sleep(0.2)
        assert not updating.done()
        needed = False
        await updating
        await asyncio.sleep(1.5)  # beyond its patience, and nothing is raised


async def test_how_busy_they_are_becomes_an_event() -> None:
    async with versioned_engine() as a, versioned_engine() as b, keeping(a, b) as kept:
        events: Events = asyncio.Queue(10)
        b.load = {"running": 1.0, "waiting": 0.0, "cache": 0.75}
        telling = asyncio.create_task(from_engines(kept.fleet, events))
        while await events.get() != EngineLoad(4, 2, 0.75):
            pass
        await b.stop()
        while await events.get() != EngineLoad(3, 2, 0.5):
            pass
        telling.cancel()


async def test_engines_that_are_not_alike_are_refused() -> None:
    async with versioned_engine() as a, versioned_engine(model="other") as b:
        with pytest.raises(EngineError, match="serve one model"):
            await keeping(a, b).__aenter__()
