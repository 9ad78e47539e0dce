"""Servers that require keys, over real sockets: a client without the right key reaches nothing."""

import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from tests.doubles.engine import EngineDouble, engine_double
from tests.doubles.env_server import ENVS, env_config, plus_one, router_spec
from tests.doubles.parts import ROUTER, serving_part
from zmq.utils.monitor import recv_monitor_message

from rollway.envserver import client as envs
from rollway.envserver.client import EnvClient
from rollway.errors import CurveKeysError, PartDied, ProtocolError
from rollway.loop.processes.part import start_part
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Scored, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.authenticator import REFUSALS
from rollway.wire.handshake import NO_KEYS_GIVEN, NOT_ACCEPTED, NOT_ITS_KEY
from rollway.wire.keys import ClientKeys, make_keys, read_client_keys
from rollway.wire.messages import Cancel, Hello, NewPolicy, NextTasks, Run, encode

pytestmark = pytest.mark.anyio


class Keyed:
    """A server that requires keys, the right keys, and keys of another server."""

    def __init__(
        self, address: str, engine: EngineDouble, folder: Path, client: Path, pid: int
    ) -> None:
        self.address = address
        self.engine = engine
        self.log = folder / "router.log"
        self.pid = pid
        self.right = read_client_keys(client)
        _, other = make_keys(folder / "other")
        unknown = read_client_keys(other)
        self.unknown = ClientKeys(unknown.secret, self.right.server)
        self.misled = ClientKeys(self.right.secret, unknown.server)


@asynccontextmanager
async def keyed(folder: Path, model: Path, latency_s: float = 0.0) -> AsyncIterator[Keyed]:
    server, client = make_keys(folder / "keys")
    async with engine_double(model, plus_one, latency_s) as engine:
        env = env_config(ENVS, "Counting", concurrency=8)
        part = msgspec.structs.replace(
            router_spec(env, model, engine.url, folder),
            keys=str(server),
            bind="tcp://127.0.0.1:*",
        )
        started = serving_part("test.router", ROUTER, part, folder / "router.log")
        async with started as (router, address):
            yield Keyed(address, engine, folder, client, router.pid)


def run_of(rollout_id: str, n: int = 5) -> Run:
    task = Task(id=str(n), prompt=f"{n}?", answer=str(n + 1))
    return Run(RolloutId(rollout_id), 1, task, Sampling(8), PolicyVersion(0), 0)


async def settled(client: EnvClient) -> Settled:
    while True:
        match await client.receive():
            case Settled() as end:
                return end


@asynccontextmanager
async def stranger(address: str, keys: ClientKeys | None) -> AsyncIterator[Any]:
    """A socket that was refused, with everything it wanted to send still waiting."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.secure(wire)
        with wire.get_monitor_socket(REFUSALS) as monitor:
            wire.connect(address)
            for message in (
                Hello("client"), run_of("intruder"), Cancel(RolloutId("r"), "sabotage"),
                NewPolicy(PolicyVersion(99)), NextTasks(0, 3),
            ):  # fmt: skip
                await wire.send(encode(message))
            await recv_monitor_message(monitor)
            wire.disable_monitor()
        yield wire


async def test_a_client_with_the_right_key_runs_rollouts(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with (
        keyed(tmp_path, tiny_moe) as server,
        envs.connect(server.address, keys=server.right) as client,
    ):
        await client.send(run_of("r"))
        end = await settled(client)
        assert isinstance(end.outcome, Scored)
        assert end.outcome.reward == 1.0


async def test_a_client_without_the_right_key_gets_no_answer_and_changes_nothing(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with (
        keyed(tmp_path, tiny_moe, latency_s=2.0) as server,
        envs.connect(server.address, keys=server.right) as client,
    ):
        await client.send(run_of("r"))
        await server.engine.until_running(1)
        for keys in (None, server.unknown, server.misled):
            async with stranger(server.address, keys) as wire:
                assert not await wire.poll(200), "not a word"
        end = await settled(client)
        assert end.rollout_id == "r"
        assert isinstance(end.outcome, Scored), "no stranger could cancel it"
        assert end.outcome.first_version == end.outcome.last_version == 0
        await client.send(run_of("after", 6))
        assert isinstance((await settled(client)).outcome, Scored)
        assert len(server.engine.prompts) == 2, "no rollout of a stranger ran"
        assert "refused connection 1: " in server.log.read_text()


async def test_a_refused_client_learns_why(tmp_path: Path, tiny_moe: Path) -> None:
    async def error(keys: ClientKeys | None, address: str, hello_s: float = 60.0) -> str:
        with pytest.raises((CurveKeysError, ProtocolError)) as refused:
            async with envs.connect(address, keys=keys, hello_s=hello_s):
                pass
        return str(refused.value)

    async with keyed(tmp_path, tiny_moe) as server:
        at = f"the env server at {server.address} refused: "
        assert await error(None, server.address) == at + NO_KEYS_GIVEN
        assert await error(server.unknown, server.address) == at + NOT_ACCEPTED
        assert await error(server.misled, server.address) == at + NOT_ITS_KEY
        gone = server.address
    assert f"no env server at {gone}: nothing listens there" in await error(
        server.right, gone, 1.0
    )
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.setsockopt(zmq.LINGER, 0)
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        assert "something else answers there" in await error(
            None, f"tcp://127.0.0.1:{port}", 1.0
        )
        assert NOT_ITS_KEY in await error(server.right, f"tcp://127.0.0.1:{port}")


async def test_an_address_that_other_machines_reach_requires_keys(
    tmp_path: Path, tiny_moe: Path
) -> None:
    env = env_config(ENVS, "Counting")
    part = router_spec(env, tiny_moe, "http://127.0.0.1:9", tmp_path)
    for bind in ("tcp://0.0.0.0:*", "tcp://*:*", "tcp://192.0.2.1:5555", "tcp://eth0:5555"):
        open_to_all = msgspec.structs.replace(part, bind=bind)
        async with start_part("test.router", ROUTER, open_to_all) as router:
            with pytest.raises(
                PartDied, match=r"--keys is required; run 'rollway keys new keys'"
            ):
                await router.listen(lambda stats: None, lambda body: None)


async def test_workers_connect_to_a_private_socket(tmp_path: Path, tiny_moe: Path) -> None:
    """Only this user can reach the workers' socket, which is in a private folder."""
    async with (
        keyed(tmp_path, tiny_moe) as server,
        envs.connect(server.address, keys=server.right),
    ):
        router = psutil.Process(server.pid)
        paths = [socket.laddr for socket in router.net_connections("unix") if socket.laddr]
        (path,) = {path for path in paths if path.endswith("/workers")}
        folder = os.stat(Path(path).parent)
        assert stat.S_IMODE(folder.st_mode) == 0o700
        assert folder.st_uid == os.getuid()
        tcp = router.net_connections("tcp")
        ports = [socket.laddr.port for socket in tcp if socket.status == psutil.CONN_LISTEN]
        assert [f"tcp://127.0.0.1:{port}" for port in ports] == [server.address]
    assert not Path(path).parent.exists()


async def test_a_long_temporary_path_works(
    tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    async with (
        keyed(tmp_path, tiny_moe) as server,
        envs.connect(server.address, keys=server.right) as client,
    ):
        await client.send(run_of("r"))
        assert isinstance((await settled(client)).outcome, Scored)
