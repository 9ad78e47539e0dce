"""A server that gets hostile frames drops and counts them, and still serves its real client."""

import asyncio
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.env_server import serving
from tests.envserver.test_frames import fake_server, settled

from rollway.config.plan import env_name
from rollway.config.sections import ServerConfig
from rollway.config.specs import ServerLimits
from rollway.envserver.core.events import ClientMessage
from rollway.envserver.core.routing import Routing
from rollway.errors import ProtocolError
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.lag import LagStats, ProcessStats
from rollway.records.rollout import Cancelled, Failed, Scored, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import (
    MAX_CLIENT_BYTES,
    Cancel,
    Drain,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Ping,
    RolloutPhases,
    Run,
    ServerStats,
    Tasks,
    Welcome,
    encode,
    from_client,
)

pytestmark = pytest.mark.anyio

RUN = Run(RolloutId("evil"), 1, Task("1", "1?"), Sampling(8), PolicyVersion(0), 0)
OF_CLIENTS = [RUN, Cancel(RolloutId("r0"), "evil"), NextTasks(0, 3), NewPolicy(PolicyVersion(9)), Ping(),
              FrameTaken(WorkerName("envs.w0.0"), 1 << 40)]  # fmt: skip
OF_OTHERS = [
    Settled(RolloutId("r0"), 1, WorkerName("envs.w0.0"), Cancelled("evil")),
    Tasks(0, ()), RolloutPhases(WorkerName("envs.w0.0"), ()),
    ServerStats(ProcessStats("evil", LagStats(), 1)),
    Welcome("evil", 1), Drain(),
]  # fmt: skip
IDENTITIES = [b"\xff\xfe\x80odd", b"envs.w0.0", b"x" * 255, b"a\nb ' ; rm"]


def mutated(frame: bytes, chance: random.Random) -> bytes:
    changed = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        match chance.randrange(4):
            case 0:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            case 1:
                del changed[chance.randrange(len(changed)) :]
            case 2:
                at = chance.randrange(len(changed) + 1)
                changed[at:at] = chance.randbytes(chance.randint(1, 8))
            case 3:
                changed += changed[: chance.randrange(len(changed) + 1)]
        if not changed:
            return b""
    return bytes(changed)


def hostile(count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield messages of one or more frames that no server should act on."""
    chance = random.Random(seed)
    valid = [encode(message) for message in (*OF_CLIENTS, *OF_OTHERS)]
    yield [b"\x91" * 200_000]
    yield [b"\xdd\xff\xff\xff\xff"]
    yield [b"x"] * 200
    yield [encode(OF_OTHERS[0]), bytes(1 << 20)]
    for number in range(count):
        match number % 4:
            case 0:
                yield [chance.randbytes(chance.randint(0, 300))]
            case 1:
                yield [chance.choice(valid)]
            case 2:
                yield [mutated(chance.choice(valid), chance)]
            case 3:
                yield [
                    mutated(chance.choice(valid), chance) for _ in range(chance.randint(2, 5))
                ]


async def attack(address: str, count: int) -> None:
    """Send hostile messages at full speed, from clients that never said Hello."""
    with zmq.asyncio.Context() as context, ExitStack() as stack:
        for seed, identity in enumerate(IDENTITIES):
            wire = stack.enter_context(context.socket(zmq.DEALER))
            wire.setsockopt(zmq.IDENTITY, identity)
            wire.connect(address)
            for message in hostile(count, seed):
                await wire.send_multipart(message)


async def test_hostile_frames_are_dropped_and_real_rollouts_continue(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(tmp_path, tiny_moe, "Counting", latency_s=0.05) as server:
        await server.run("warm", "0")
        await server.outcome("warm")
        before = psutil.Process(server.pid).memory_info().rss
        attacking = asyncio.ensure_future(attack(server.address, 1_000))
        for n in range(60):
            await server.run(f"r{n}", str(n))
        outcomes = [await server.outcome(f"r{n}") for n in range(60)]
        await attacking
        await server.run("after", "7")
        outcomes.append(await server.outcome("after"))
        assert all(isinstance(outcome, Scored) for outcome in outcomes), outcomes
        assert all(
            outcome.first_version == 0 for outcome in outcomes if isinstance(outcome, Scored)
        )
        assert set(server.settled) == {"warm", "after", *(f"r{n}" for n in range(60))}
        assert all(len(ends) == 1 for ends in server.settled.values())
        assert not [stats for stats in server.stats if stats.process == "evil"]
        assert psutil.Process(server.pid).memory_info().rss - before < 20 << 20
    log = (tmp_path / "router.log").read_text()
    assert "dropped bad frame 1: " in log
    assert "dropped unexpected message 1" in log
    assert len(log.splitlines()) < 100, "the log stays short"
    assert max(map(len, log.splitlines())) < 400


async def test_a_message_that_is_too_large_costs_its_sender_the_connection(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(tmp_path, tiny_moe, "Counting") as server:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as wire:
            wire.setsockopt(zmq.LINGER, 0)
            with wire.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                wire.connect(server.address)
                await wire.send(bytes(MAX_CLIENT_BYTES + 1))
                await monitor.recv_multipart()
                wire.disable_monitor()
        large = msgspec.structs.replace(RUN, task=Task("1", "x" * (MAX_CLIENT_BYTES + 1)))
        with pytest.raises(
            ProtocolError, match=r"its task has 16\.8 MB, .* an env server may have 16 MB"
        ):
            await server.client.send(large)
        (unsent,) = await server.client.send_runs([large])
        assert isinstance(unsent.outcome, Failed)
        assert (unsent.rollout_id, unsent.outcome.boundary) == (large.rollout_id, "env")
        await server.run("r", "0")
        assert isinstance(await server.outcome("r"), Scored)


BAD_INFO = {
    "no map": b"\x05",
    "no text": b"\x81\xa2\xff\xfe\x00",
    "no key": b"\x81\xa1a\x81\x80\x00",
    "deep": b"\x81\xa1a" + b"\x91" * 600 + b"\x00",
}


async def test_a_task_that_cannot_be_read_fails_its_rollout_and_nothing_else(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(tmp_path, tiny_moe, "Counting") as server:
        for name, info in BAD_INFO.items():
            rollout_id = name.replace(" ", "-")
            tree = msgspec.to_builtins(RUN) | {"rollout_id": rollout_id}
            tree["task"] = {
                "id": "1",
                "prompt": "1?",
                "answer": "2",
                "info": msgspec.Raw(info),
            }
            await server.client._wire.send(msgspec.msgpack.encode(tree))
            outcome = await server.outcome(rollout_id)
            assert isinstance(outcome, Failed | Scored)
            if name != "deep":
                assert isinstance(outcome, Failed)
                assert "its task cannot be read: bad frame" in outcome.error
        await server.run("good", "0")
        assert isinstance(await server.outcome("good"), Scored)
        assert not server.lost, "no worker died"


async def test_a_client_drops_messages_that_a_server_must_not_send(tmp_path: Path) -> None:
    """Malformed headers, messages of workers and extra frames are counted, and the next one arrives."""
    async with fake_server(None) as (client, send):
        bad = [
            [b""],
            [b"\x91" * 200_000],
            [encode(RUN)],
            [encode(Ping()), b"raw"],
            [b"a", b"b", b"c"],
        ]
        hostile_ref = msgspec.to_builtins(settled("r", 1))
        hostile_ref["outcome"]["ref"]["segment"] = "../../run.db"
        bad.append([msgspec.msgpack.encode(hostile_ref)])
        for frames in bad:
            await send.raw(frames)
        received, _ = await send(Settled(RolloutId("r"), 1, WorkerName("w"), Cancelled("")))
        assert received.rollout_id == "r"
        assert client.bad_frames.count == len(bad)


@given(
    st.lists(
        st.tuples(st.sampled_from([b"known", b"stranger"]), st.integers(), st.booleans()),
        max_size=30,
    )
)
def test_the_core_survives_every_message_that_decodes(
    messages: list[tuple[bytes, int, bool]],
) -> None:
    """No message raises, and strangers leave nothing behind."""
    core = Routing("env", ServerConfig(), ServerLimits())
    core.on_event(ClientMessage(b"known", Hello("client")))
    for client, seed, is_intact in messages:
        chance = random.Random(seed)
        frame = encode(chance.choice(OF_CLIENTS))
        try:
            message: Any = from_client(frame if is_intact else mutated(frame, chance))
        except ProtocolError:
            continue
        before = core.num_open
        core.on_event(ClientMessage(client, message))
        assert client == b"known" or core.num_open == before


def names_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


async def test_ids_never_become_paths_or_commands(tmp_path: Path, tiny_moe: Path) -> None:
    """Clients choose the ids of tasks and rollouts, so the server must not trust them."""
    home = tmp_path / "a" / "b" / "server"
    home.mkdir(parents=True)
    odd = [
        "../../../x",
        "/etc/x",
        "$(touch${IFS}x)",
        "`id`;touch\tx",
        "-rf",
        "%s%n",
        "a\x00b",
        "ü\n",
    ]
    async with serving(home, tiny_moe, "Counting") as server:
        for n, task_id in enumerate(odd):
            task = Task(id=task_id, prompt="1?", answer="2")
            rollout_id = RolloutId(f"../../{n};$(touch${{IFS}}y)")
            await server.client.send(
                Run(rollout_id, 1, task, Sampling(8), PolicyVersion(0), 0)
            )
            assert isinstance(await server.outcome(rollout_id), Scored)
    written = {"router.log", "envs.w0.log", "envs.w0.0-0000.seg"}
    assert names_below(tmp_path) == {"a", "b", "server"} | written


@given(st.text(min_size=1))
def test_an_environments_name_is_safe_in_a_path_whatever_its_id(env_id: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]+", env_name(env_id))
    assert re.fullmatch(r"[A-Za-z0-9_-]+", env_name(f"{env_id}.py"))
