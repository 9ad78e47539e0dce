"""The engines of a run as the orchestrator keeps them: real servers that refuse, vanish and return."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from msgspec.structs import replace
from tests.doubles.versioned import VersionedEngine, probe, versioned_engine
from tests.orchestrator.builders import core_spec, scored

from rollway.config.sections import EngineConfig, PayloadConfig, TransportConfig
from rollway.config.specs import OrchestratorSpec, WatchSpec
from rollway.errors import EngineError
from rollway.inference.engines.control import QUERY_DEADLINE_S
from rollway.loop.processes.part import first_cause
from rollway.orchestrator.core.commands import UpdateWeights
from rollway.orchestrator.shell.fleet import EngineFleet, open_fleet
from rollway.orchestrator.shell.sources import Events, from_engines
from rollway.records.engine import EngineLoad, fresh_kl_key
from rollway.records.ids import PolicyVersion, RolloutId, Step, WorkerName
from rollway.records.probe import CachedText
from rollway.records.rollout import Failed, Settled
from rollway.records.turn import Sampling
from rollway.rundir.rundir import RunDir, write_whole

pytestmark = pytest.mark.anyio

LOADED = [
    "/pause",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/resume",
    "/update_weight_version",
]
CONFIRMED = ["/update_weight_version"]


QUICK_S = 0.05
"""How often the fleets of these tests look at their engines."""


def publish(run: RunDir, version: int, cached_tokens: int = 0) -> str:
    """Write a version's probe, and return the folder of its weights."""
    written = probe(version)
    if cached_tokens:
        # the double gives -0.5 to every next token
        written = replace(written, cached=CachedText((7,) * cached_tokens, -3.5))
    write_whole(run.probe_of(PolicyVersion(version)), msgspec.msgpack.encode(written))
    return str(run.weights_of(PolicyVersion(version)))


class WatchedFleet:
    """A fleet that is watched, and what it said."""

    def __init__(self, run: RunDir, fleet: EngineFleet, messages: list[str]) -> None:
        self.run = run
        self.fleet = fleet
        self.messages = messages

    async def update(self, version: int) -> None:
        """Publish a version with its probe, and wait until the engines have it."""
        await self.fleet.update(
            UpdateWeights(PolicyVersion(version), publish(self.run, version))
        )

    async def until_trouble(self) -> None:
        await self.until_silent(0.0)

    async def until_silent(self, silent_s: float) -> None:
        """Wait until the first engine has given no answer for longer than this."""
        while self.fleet.states()[0].silent_s <= silent_s:  # noqa: ASYNC110
            await asyncio.sleep(QUICK_S)


@asynccontextmanager
async def watched_fleet(
    *engines: VersionedEngine,
    first_step: int = 1,
    patience_s: float = 60.0,
    must_push: bool = False,
    is_needed: Callable[[], bool] = lambda: True,
    cached_tokens: int = 0,
    temperature: float = 1.0,
) -> AsyncIterator[WatchedFleet]:
    messages: list[str] = []

    async def say(text: str) -> None:
        messages.append(text)

    with tempfile.TemporaryDirectory(prefix="rollway-fleet-") as folder:
        run = RunDir(folder)
        weights = publish(run, first_step - 1, cached_tokens)
        spec = OrchestratorSpec(
            core=core_spec(),
            sampling=Sampling(8, temperature),
            envs=(),
            engine_urls=tuple(engine.url for engine in engines),
            engine=EngineConfig(patience_s=patience_s, request_deadline_s=5.0),
            weights=weights,
            model_path="",
            must_push=must_push,
            payload=PayloadConfig(),
            transport=TransportConfig(),
            first_step=Step(first_step),
            run_dir=folder,
            watch=WatchSpec(),
        )
        opening = open_fleet(spec, say, is_needed, look_every_s=QUICK_S)
        async with opening as fleet, asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(fleet.watch())
            yield WatchedFleet(run, fleet, messages)
            watching.cancel()


def controls(engine: VersionedEngine) -> list[str]:
    return [path for path in engine.calls if path != "/weight_info"]


async def test_new_weights_are_loaded_into_every_engine_and_verified() -> None:
    async with (
        versioned_engine() as a,
        versioned_engine() as b,
        watched_fleet(a, b) as watched,
    ):
        assert (controls(a), controls(b)) == (CONFIRMED, CONFIRMED), "they have version 0"
        await watched.update(1)
        assert (a.weights, b.weights, a.version, b.version) == (1, 1, "1", "1")
        assert [state.version for state in watched.fleet.states()] == [1, 1]
        assert watched.messages == []
    for engine in (a, b):
        assert controls(engine) == CONFIRMED + LOADED


async def test_an_engine_with_other_weights_than_the_model_is_refused_at_the_start() -> None:
    async with versioned_engine() as engine:
        engine.weights = 5
        with pytest.raises(
            EngineError, match=r"at version 0 the logprobs of 132 tokens differ by"
        ):
            await watched_fleet(engine).__aenter__()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
async def test_an_engine_may_round_as_much_as_its_number_format_does(dtype: str) -> None:
    async with versioned_engine() as engine:
        engine.rounding = 0.01
        with pytest.raises(EngineError, match="coarser number format"):
            await watched_fleet(engine).__aenter__()
        engine.dtype = dtype
        async with watched_fleet(engine) as watched:
            await watched.update(1)
            assert engine.version == "1"


async def test_an_engine_that_does_not_load_what_it_is_given_is_taken_out_of_service() -> (
    None
):
    async with (
        versioned_engine() as good,
        versioned_engine(ignores_updates=True) as deaf,
        watched_fleet(good, deaf) as watched,
    ):
        told = asyncio.Event()

        async def tell() -> None:
            told.set()

        watched.fleet.on_refused = tell
        watched.fleet.unsettled = lambda: [RolloutId("g1.0"), RolloutId("g1.1")]
        await watched.update(1)
        assert told.is_set()
        assert watched.fleet.refused == (deaf.url,)
        assert deaf.version == "0", "it was not told that it has version 1"
        (message,) = watched.messages
        assert message.startswith(f"The engine at {deaf.url} is out of service: at version 1")
        assert "still has the weights of version 0: its load changes nothing" in message
        drawn_by_both = await watched.fleet.vet(settled("g1.0", good.url, deaf.url))
        assert drawn_by_both.outcome == Failed(
            "engine", f"the engine at {deaf.url}, which drew it, was taken out of service"
        )
        for urls in ((), ("http://other:8000",), (good.url, "http://other:8000")):
            drawn_by_any = await watched.fleet.vet(settled("g1.1", *urls))
            assert drawn_by_any.outcome == Failed(
                "engine",
                f"the engine at {deaf.url}, which may have drawn it, was taken out of service",
            )
        for rollout_id, urls in (("g1.1", (good.url,)), ("g2.0", (deaf.url,)), ("g2.0", ())):
            fine = settled(rollout_id, *urls)
            assert await watched.fleet.vet(fine) is fine
        deaf.ignores_updates = False
        await watched.update(2)
        assert (deaf.weights, deaf.version, watched.fleet.refused) == (2, "2", ())
        assert watched.messages[1].endswith(f"{deaf.url} is in service again, at version 2")


async def test_an_engine_whose_rows_depart_from_the_others_is_taken_out_of_service() -> None:
    async with (
        versioned_engine() as good,
        versioned_engine() as other,
        watched_fleet(good, other) as watched,
    ):
        await watched.update(1)
        version = PolicyVersion(2)
        await watched.fleet.compare_kls(version, {fresh_kl_key(good.url): 1e-7})
        both = {fresh_kl_key(url): 0.5 for url in (good.url, other.url)}
        await watched.fleet.compare_kls(version, both)
        assert watched.fleet.refused == ()
        kls = {fresh_kl_key(good.url): 1e-7, fresh_kl_key(other.url): 0.5}
        await watched.fleet.compare_kls(version, kls)
        assert watched.fleet.refused == (other.url,)
        (message,) = watched.messages
        assert (
            f"{other.url} is out of service: the KL between trainer and engine is 0.5"
            in message
        )
        await watched.update(2)
        assert watched.fleet.refused == (other.url,)
        await watched.update(3)
        assert watched.fleet.refused == (), "it loaded version 3 rightly"


async def test_a_rollout_waits_for_the_verdict_about_its_engine() -> None:
    """A rollout that does not say which engines drew it waits for all."""
    async with versioned_engine() as engine, watched_fleet(engine) as watched:
        engine.may_score.clear()
        updating = asyncio.create_task(watched.update(1))
        await engine.wait_until(lambda: "/resume" in engine.calls)
        vetting = [
            asyncio.create_task(watched.fleet.vet(settled("g1.0", *urls)))
            for urls in ((engine.url,), ())
        ]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in vetting)
        engine.may_score.set()
        await asyncio.gather(updating, *vetting)


async def test_a_rollout_of_a_version_that_the_run_has_not_published_fails() -> None:
    """Also a rollout of a chat endpoint, which names no engine."""
    async with versioned_engine() as engine, watched_fleet(engine) as watched:
        await watched.update(1)
        for urls in ((engine.url,), ()):
            early = settled("g1.0", *urls, last_version=2)
            assert (await watched.fleet.vet(early)).outcome == Failed(
                "engine",
                "its reply names version 2, and the run has published version 1 last: does another "
                "run use this engine?",
            )
            fine = settled("g1.0", *urls, last_version=1)
            assert await watched.fleet.vet(fine) is fine


async def test_a_run_ends_if_its_only_engine_cannot_load_a_version() -> None:
    async with versioned_engine() as engine:
        engine.refuses_updates = True
        with pytest.raises(BaseExceptionGroup) as raised:
            async with watched_fleet(engine) as watched:
                await watched.update(1)
    text = str(first_cause(raised.value))
    assert text.startswith(
        f"the engine at {engine.url} is out of service: it cannot load version 1"
    )
    assert "HTTP 500: no such tensor" in text
    assert "/resume" not in engine.calls, "its model may be broken"


async def test_an_engine_that_something_else_gives_weights_is_named() -> None:
    async with versioned_engine() as engine:
        engine.ignores_labels, engine.version = True, "7"
        with pytest.raises(EngineError, match="told that it has version 0 and reports '7'"):
            await watched_fleet(engine).__aenter__()


async def test_a_text_that_does_not_fit_the_window_is_not_asked_for() -> None:
    async with versioned_engine(max_model_len=64) as engine:
        with pytest.raises(EngineError, match="prefix cache"):
            await watched_fleet(engine, cached_tokens=63, first_step=2).__aenter__()
        async with watched_fleet(engine, cached_tokens=64, first_step=2):
            assert engine.version == "1"


async def test_a_trainer_that_writes_no_probes_is_mentioned_once() -> None:
    async with versioned_engine() as engine, watched_fleet(engine) as watched:
        for version in (1, 2):
            await watched.fleet.update(
                UpdateWeights(PolicyVersion(version), f"/none/step_{version}")
            )
        assert engine.version == "2"
        (message,) = watched.messages
    assert message.startswith("The trainer writes no probe beside its weights")


def settled(rollout_id: str, *engines: str, last_version: int = 0) -> Settled:
    last = PolicyVersion(last_version)
    outcome = replace(scored(1.0, 0), engines=engines, last_version=last)
    return Settled(RolloutId(rollout_id), 1, WorkerName("w0"), outcome)


@pytest.mark.parametrize(
    ("has", "must_push"), [("7", False), ("3", True), ("default", False)]
)
async def test_engines_begin_with_the_weights_of_the_run(has: str, must_push: bool) -> None:
    """Another run's version may have the same number."""
    async with versioned_engine() as engine:
        engine.version = has
        async with watched_fleet(engine, first_step=4, must_push=must_push):
            assert controls(engine) == LOADED
            assert engine.version == "3"


async def test_a_restarted_engine_loads_the_weights_it_missed() -> None:
    async with (
        versioned_engine() as a,
        versioned_engine() as b,
        watched_fleet(a, b) as watched,
    ):
        await watched.update(1)
        await b.stop()
        await watched.update(2)
        assert a.version == "2", "the others are not held up"
        await b.start()
        await b.wait_until(lambda: b.version == "2")
        await a.stop()
        await a.start()  # before anybody could notice that it was gone
        await a.wait_until(lambda: a.version == "2")
        await a.wait_until(lambda: controls(a) == CONFIRMED + 3 * LOADED)
        await b.wait_until(lambda: controls(b) == CONFIRMED + 2 * LOADED)
    assert watched.messages[0].startswith(f"No answer from the engine at {b.url} (")
    assert "; the others take its rollouts" in watched.messages[0]
    assert any(
        text.startswith(f"The engine at {b.url} is back after ") for text in watched.messages
    )


async def test_an_update_waits_for_an_engine_that_can_take_it() -> None:
    async with versioned_engine() as engine, watched_fleet(engine) as watched:
        await engine.stop()
        updating = asyncio.create_task(watched.update(1))
        await asyncio.sleep(0.2)
        assert not updating.done()
        await engine.start()
        await updating
        assert engine.version == "1"


async def test_an_engine_that_hangs_is_in_trouble_until_it_answers_again() -> None:
    async with versioned_engine() as engine, watched_fleet(engine) as watched:
        engine.may_answer.clear()
        await watched.until_trouble()
        (state,) = watched.fleet.states()
        assert state.trouble == f"/metrics did not answer within {QUERY_DEADLINE_S:g} s"
        assert state.silent_s >= QUERY_DEADLINE_S
        updating = asyncio.create_task(watched.update(1))
        engine.may_answer.set()
        await updating
        assert engine.version == "1"
        assert not watched.fleet.states()[0].trouble


async def test_an_engine_without_a_version_loads_weights_when_it_comes_back() -> None:
    async with (
        versioned_engine(hides_version=True) as engine,
        watched_fleet(engine) as watched,
    ):
        await watched.update(1)
        await engine.stop()
        await watched.until_trouble()
        await engine.start()
        await engine.wait_until(lambda: engine.version == "1")


async def test_an_engine_that_comes_back_with_other_settings_is_refused() -> None:
    """Somebody started it again, and forgot an option."""
    async with (
        versioned_engine() as other,
        versioned_engine() as engine,
        watched_fleet(engine, other, temperature=0.7) as watched,
    ):
        await watched.update(1)
        await engine.stop()
        await watched.until_trouble()
        engine.logprobs_mode = "raw_logprobs"
        await engine.start()
        while not watched.fleet.refused:  # noqa: ASYNC110
            await asyncio.sleep(QUICK_S)
        assert watched.fleet.refused == (engine.url,)
        assert "--logprobs-mode processed_logprobs" in watched.messages[-1]


async def test_the_run_stops_when_no_engine_came_back_in_time() -> None:
    async def run(a: VersionedEngine, b: VersionedEngine) -> None:
        async with watched_fleet(a, b, patience_s=0.3) as watched:
            await a.stop()
            await watched.until_silent(0.6)
            await b.stop()  # one engine is enough: only now does the run wait
            await asyncio.sleep(30)

    async with versioned_engine() as a, versioned_engine() as b:
        with pytest.raises(BaseExceptionGroup) as raised:
            await run(a, b)
    text = str(first_cause(raised.value))
    assert text.startswith(f"none of the 2 engines answers: {a.url} for ")
    assert b.url in text
    assert "engine.patience_s is 0.3" in text
    assert "--resume continues" in text


async def test_an_update_without_engines_ends_when_no_more_samples_are_needed() -> None:
    needed = True
    async with (
        versioned_engine() as engine,
        watched_fleet(engine, is_needed=lambda: needed) as watched,
    ):
        await engine.stop()
        updating = asyncio.create_task(watched.update(1))
        await watched.until_silent(0.2)
        assert not updating.done()
        needed = False
        await updating


async def test_a_run_that_needs_no_more_samples_waits_for_no_engine() -> None:
    async with (
        versioned_engine() as engine,
        watched_fleet(engine, patience_s=0.2, is_needed=lambda: False) as watched,
    ):
        await engine.stop()
        await watched.until_silent(0.6)  # beyond its patience, and nothing is raised


async def test_the_load_of_the_engines_becomes_an_event() -> None:
    async with (
        versioned_engine() as a,
        versioned_engine() as b,
        watched_fleet(a, b) as watched,
    ):
        events: Events = asyncio.Queue(10)
        b.load = {"running": 1.0, "waiting": 0.0, "cache": 0.75}
        telling = asyncio.create_task(from_engines(watched.fleet, events))
        while await events.get() != EngineLoad(4, 2, 0.75):
            pass
        await b.stop()
        while await events.get() != EngineLoad(3, 2, 0.5):
            pass
        telling.cancel()


async def test_engines_that_are_not_alike_are_refused() -> None:
    async with versioned_engine() as a, versioned_engine(model="other") as b:
        with pytest.raises(EngineError, match="serve one model"):
            await watched_fleet(a, b).__aenter__()
