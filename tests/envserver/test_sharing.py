"""Clients that share a server or leave it, the number of its workers, and its end."""

import asyncio
import os
import signal
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from tests.doubles.engine import engine_double
from tests.doubles.env_server import (
    UNRULY,
    Server,
    env_config,
    plus_one,
    router_spec,
    serving,
    unruly,
)
from tests.doubles.parts import ROUTER, serving_part

from rollway.config.specs import ServerLimits
from rollway.envserver import client as envs
from rollway.errors import ProtocolError
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Cancelled, Failed, Scored, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import Cancel, NewPolicy, NextTasks, Run, ServerStats, Tasks

pytestmark = [pytest.mark.anyio, pytest.mark.system]


LEASE = ServerLimits(client_lease_s=5.0)


async def receive_forever(client: envs.EnvClient) -> None:
    while True:
        await client.receive()


async def test_two_clients_use_the_same_ids(tmp_path: Path, tiny_moe: Path) -> None:
    async with (
        unruly(tmp_path, tiny_moe, "Patient", latency_s=0.5) as first,
        envs.connect(first.address) as client,
    ):
        second = Server(client, first.engine, first.pid, tmp_path)
        for server, task in ((first, "0"), (second, "1")):
            await server.client.send(NextTasks(int(task), 1))
            for n in range(4):
                await server.run(f"r{n}", task)
        await second.client.send(Cancel(RolloutId("r0"), "only this one"))
        for server, task in ((first, "0"), (second, "1")):
            assert [task.id for task in (await server.receive(Tasks)).tasks] == [task]
            for n in range(4):
                end = await server.outcome(f"r{n}")
                if server is second and n == 0:
                    assert end == Cancelled("only this one")
                else:
                    assert isinstance(end, Scored)
            assert all(len(ends) == 1 for ends in server.settled.values())


async def test_a_client_that_vanishes_leaves_nothing_running(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with unruly(tmp_path, tiny_moe, "Patient", latency_s=300, limits=LEASE) as server:
        async with envs.connect(server.address) as client:
            gone = Server(client, server.engine, server.pid, tmp_path)
            for n in range(12):  # 8 run, 4 wait
                await gone.run(f"r{n}", "0")
            await server.engine.until_running(8)
        await server.engine.until_running(0)
        assert server.engine.num_aborted == 8
        while server.stats[-1].in_flight or ".w" not in server.stats[-1].process:
            await server.receive(ServerStats)


async def test_a_hundred_cancelled_rollouts_leave_nothing_running(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with unruly(
        tmp_path, tiny_moe, "Patient", latency_s=300, concurrency=100
    ) as server:
        for n in range(100):
            await server.run(f"r{n}", "0")
        await server.engine.until_running(100)
        for n in range(100):
            await server.client.send(Cancel(RolloutId(f"r{n}"), "enough"))
        ends = [await server.outcome(f"r{n}") for n in range(100)]
        assert ends == [Cancelled("enough")] * 100
        async with asyncio.timeout(10.0):
            await server.engine.until_running(0)
        assert server.engine.num_aborted == 100
        server.stats.clear()
        while not any(
            stats.in_flight == 0 and ".w" in stats.process for stats in server.stats
        ):
            await server.receive(ServerStats)


async def test_workers_are_started_under_load_and_ended_when_idle(
    tmp_path: Path, tiny_moe: Path
) -> None:
    limits = ServerLimits(idle_s=2.0)
    size = {"workers": 3, "min_workers": 1, "concurrency": 1, "limits": limits}
    async with serving(
        tmp_path, tiny_moe, "Patient", file=UNRULY, latency_s=30, **size
    ) as server:
        await server.until_up(1)
        assert len(server.workers()) == 1
        for n in range(3):
            await server.run(f"r{n}", "0")
        await server.engine.until_running(3)
        for n in range(3):
            await server.client.send(Cancel(RolloutId(f"r{n}"), "enough"))
        ends = [await server.outcome(f"r{n}") for n in range(3)]
        assert ends == [Cancelled("enough")] * 3
        assert len({ends[0].worker for ends in server.settled.values()}) == 3
        while len(server.workers()) > 1:
            await server.receive(ServerStats)
        assert not server.lost, "they were drained"
        await server.run("again", "0")
        await server.engine.until_running(1)


async def test_after_sigterm_running_rollouts_finish_and_waiting_ones_are_cancelled(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with unruly(tmp_path, tiny_moe, "Patient", concurrency=4) as server:
        replies = server.hold_replies()
        router = psutil.Process(server.pid)
        children = router.children(recursive=True)
        for n in range(8):
            await server.run(f"r{n}", "0")
        await server.engine.until_running(4)
        os.kill(server.pid, signal.SIGTERM)
        while len(server.settled) < 4:
            await server.receive(Settled)
        replies.set()
        ends = [await server.outcome(f"r{n}") for n in range(8)]
        assert sum(isinstance(end, Scored) for end in ends) == 4
        assert ends.count(Cancelled("the env server is ending")) == 4
        psutil.wait_procs(children, timeout=60)
        assert not [child for child in children if child.is_running()]


async def test_a_drain_ends_after_its_limit(tmp_path: Path, tiny_moe: Path) -> None:
    async with unruly(
        tmp_path, tiny_moe, "Patient", latency_s=300, limits=ServerLimits(drain_s=1.0)
    ) as server:
        await server.run("r", "0")
        await server.engine.until_running(1)
        os.kill(server.pid, signal.SIGTERM)
        assert await server.outcome("r") == Cancelled("the env server is ending")
        await server.engine.until_running(0)


async def test_a_client_notices_that_its_server_is_gone(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with (
        unruly(tmp_path, tiny_moe, "Patient") as server,
        envs.connect(server.address, silent_s=2.0) as client,
    ):
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(ProtocolError, match="has sent nothing for 2 s"):
                await receive_forever(client)
        finally:
            os.kill(server.pid, signal.SIGCONT)


async def test_an_error_says_why_a_client_cannot_connect(
    tmp_path: Path, tiny_moe: Path
) -> None:
    with pytest.raises(
        ProtocolError, match=r"no env server at tcp://127\.0\.0\.1:9: nothing listens there"
    ):
        async with envs.connect("tcp://127.0.0.1:9", hello_s=1.0):
            pass
    env = env_config(UNRULY, "NeverLoads")
    part = router_spec(env, tiny_moe, "http://127.0.0.1:9", tmp_path)
    async with serving_part("test.router", ROUTER, part, tmp_path / "router.log") as (_, at):
        with pytest.raises(ProtocolError, match="none of its workers has started within 3 s"):
            async with envs.connect(at, hello_s=3.0):
                pass


async def test_a_server_that_is_started_again_is_greeted_again(
    tmp_path: Path, tiny_moe: Path
) -> None:
    """What ran in the old one fails, what was asked of it is asked again, and new rollouts run."""
    with tempfile.TemporaryDirectory() as short:
        async with engine_double(tiny_moe, plus_one) as engine, AsyncExitStack() as stack:
            env = env_config(UNRULY, "Patient", concurrency=8)
            spec = replace(
                router_spec(env, tiny_moe, engine.url, tmp_path), bind=f"ipc://{short}/socket"
            )
            async with serving_part("test.router", ROUTER, spec, tmp_path / "1.log") as (
                part,
                at,
            ):
                client = await stack.enter_async_context(envs.connect(at))
                server = Server(client, engine, part.pid, tmp_path)
                task = Task("1000", "5?")
                run = Run(RolloutId("old"), 1, task, Sampling(8), PolicyVersion(0), 0)
                assert await client.send_runs([run]) == []
                await engine.until_running(0)
                os.kill(part.pid, signal.SIGSTOP)  # it answers nothing of this:
                await client.send(NextTasks(3, 2))
                await client.send(NewPolicy(PolicyVersion(7)))
                part.kill()
            spec = replace(spec, generation=1)
            async with serving_part("test.router", ROUTER, spec, tmp_path / "2.log") as (
                part,
                at,
            ):
                lost = await server.outcome("old")
                assert isinstance(lost, Failed)
                assert (lost.boundary, lost.error) == (
                    "worker", f"the env server at {at} was started again",
                )  # fmt: skip
                await server.run("new", "0")
                tasks = await server.receive(Tasks)
                assert [task.id for task in tasks.tasks] == ["3", "4"]
                new = await server.outcome("new")
                assert isinstance(new, Scored)
                assert new.last_version == 7, "the version of the client, not of this rollout"
