"""Workers whose engine goes away, or comes back with other weights: a real server, a real engine."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.doubles.env_server import ENVS, env_config, router_spec
from tests.doubles.parts import ROUTER
from tests.doubles.versioned import versioned_engine

from rollway.config.sections import EngineConfig
from rollway.envserver import client as envs
from rollway.errors import PartDied
from rollway.loop.processes.part import start_part
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Outcome, Scored, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import Run, WorkerLost

pytestmark = pytest.mark.anyio

ENV = env_config(ENVS, "Counting")
ENGINE = EngineConfig(routes=False)


async def ask(client: envs.EnvClient, id: str, version: int) -> None:
    task = Task(id="5", prompt="5?", answer="6")
    await client.send(Run(RolloutId(id), 1, task, Sampling(8), PolicyVersion(version), 0))


async def outcome(client: envs.EnvClient) -> Outcome:
    while True:
        match await client.receive():
            case Settled(outcome=end):
                return end


async def test_a_worker_waits_for_an_engine_also_when_it_has_just_started(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with versioned_engine() as engine:
        part = router_spec(ENV, tiny_moe, engine.url, tmp_path)
        part = msgspec.structs.replace(part, engine=ENGINE)
        async with start_part(
            "test.router", ROUTER, part, log=tmp_path / "router.log"
        ) as router:
            listening = asyncio.ensure_future(
                router.listen(lambda stats: None, lambda body: None)
            )
            async with envs.connect(await router.ready()) as client:
                await ask(client, "g0.0", 0)
                assert isinstance(await outcome(client), Scored)
                await engine.stop()
                (worker,) = psutil.Process(router.pid).children()
                os.kill(worker.pid, signal.SIGKILL)
                while not isinstance(await client.receive(), WorkerLost):
                    pass
                await ask(client, "g1.0", 2)
                await engine.start()
                await engine.wait_until(lambda: "/weight_info" in engine.calls)
                assert len(engine.requests) == 1, "it has version 0, and the rollout wants 2"
                engine.version = "2"
                end = await outcome(client)
                assert isinstance(end, Scored)
                assert (end.first_version, end.last_version) == (2, 2)
            listening.cancel()
    assert [version for _, version in engine.requests] == ["0", "2"]


async def test_an_engine_that_is_not_there_when_a_server_starts_is_a_mistake(
    tmp_path: Path, tiny_moe: Path
) -> None:
    part = router_spec(ENV, tiny_moe, "http://127.0.0.1:9", tmp_path)
    async with start_part("test.router", ROUTER, part, log=tmp_path / "router.log") as router:
        with pytest.raises(
            PartDied, match=r"no engine at http://127\.0\.0\.1:9: cannot connect"
        ):
            await router.listen(lambda stats: None, lambda body: None)
