"""Payload without a shared file system: real server, real client, the same bytes in the end."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio
from tests.doubles.env_server import serving

from rollway.config.sections import PayloadConfig
from rollway.config.specs import ServerLimits
from rollway.envserver import client as envs
from rollway.payload.blob import build, join, relabel
from rollway.payload.reader import SegmentReader
from rollway.payload.writer import SegmentWriter
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.payload import PayloadRef, SegmentName, frame_ref
from rollway.records.rollout import Failed, RowSummary, Scored, Settled, Timing
from rollway.wire.messages import (
    FrameTaken,
    Hello,
    Ping,
    ServerStats,
    Welcome,
    encode,
    from_client,
)

pytestmark = pytest.mark.anyio

FRAMES: dict[str, Any] = {
    "payload": PayloadConfig(store="frames"),
    "limits": ServerLimits(frames_mb=1),
}


def folders(tmp_path: Path, *names: str) -> list[Path]:
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.mkdir()
    return paths


def raw(folder: Path, ref: PayloadRef) -> bytes:
    """Return a blob's bytes as they were before they were written to a segment."""
    blob = (folder / ref.segment).read_bytes()[ref.offset : ref.offset + ref.length]
    return b"".join(relabel(memoryview(blob), ""))


async def test_the_trainer_maps_the_same_bytes_either_way(
    tmp_path: Path, tiny_moe: Path
) -> None:
    files, remote, here = folders(tmp_path, "files", "remote", "here")
    async with serving(files, tiny_moe, "ThreeTurns") as server:
        await server.run("r", "5")
        by_file = await server.outcome("r")
    with SegmentWriter(here, SegmentName("env.in", 0), 1 << 20) as landing:
        async with serving(
            remote, tiny_moe, "ThreeTurns", landing=landing, **FRAMES
        ) as server:
            await server.run("r", "5")
            by_frame = await server.outcome("r")
    assert isinstance(by_file, Scored)
    assert isinstance(by_frame, Scored), by_frame
    assert by_frame.ref.segment == "env.in.0-0000.seg"
    assert not list(remote.glob("*.seg")), "the worker wrote no file"
    SegmentReader(here).verify(by_frame.ref)
    assert raw(here, by_frame.ref) == raw(files, by_file.ref)


async def test_a_slow_receiver_slows_the_worker(tmp_path: Path, tiny_moe: Path) -> None:
    """While the client receives nothing, the worker stops at its window, with rollouts in flight."""
    (here,) = folders(tmp_path, "here")
    with SegmentWriter(here, SegmentName("env.in", 0), 1 << 20) as landing:
        async with serving(tmp_path, tiny_moe, "Wordy", landing=landing, **FRAMES) as server:
            replies = server.hold_replies()
            for n in range(8):
                await server.run(f"r{n}", str(n))
            await server.engine.until_running(8)
            replies.set()
            await server.engine.until_running(0)
            async with envs.connect(server.address) as watcher:
                left = await wait_for_steady_load(watcher)
            assert 0 < left < 8
            outcomes = [await server.outcome(f"r{n}") for n in range(8)]
    assert all(isinstance(outcome, Scored) for outcome in outcomes), outcomes
    sizes = [outcome.ref.length for outcome in outcomes if isinstance(outcome, Scored)]
    assert (8 - left) * max(sizes) <= 1 << 20 < (8 - left + 1) * max(sizes)
    for outcome in outcomes:
        SegmentReader(here).verify(outcome.ref)  # type: ignore[union-attr]


async def wait_for_steady_load(watcher: envs.EnvClient) -> int:
    """Return the worker's rollouts in flight once that number is the same for three seconds."""
    seen: list[int] = []
    while len(seen) < 4 or len(set(seen[-4:])) > 1:
        match await watcher.receive():
            case ServerStats(stats=stats) if ".w" in stats.process:
                seen.append(stats.in_flight)
    return seen[-1]


def settled(rollout_id: str, length: int) -> Settled:
    timing = Timing(0.0, 0.0, 0.0, 0.0)
    rows, ref = (RowSummary(1, 1),), frame_ref(length)
    scored = Scored(
        1.0, {}, {}, rows, ref, 1, "stop", PolicyVersion(0), PolicyVersion(0), timing
    )
    return Settled(RolloutId(rollout_id), 1, WorkerName("w0.0"), scored)


class ServersEnd:
    """The server's end of a client's connection. A call sends a message, and returns what the client
    received and what it answered."""

    def __init__(self, wire: Any, peer: bytes, client: envs.EnvClient) -> None:
        self._wire = wire
        self._peer = peer
        self._client = client

    async def raw(self, frames: list[bytes]) -> None:
        await self._wire.send_multipart([self._peer, *frames])

    async def __call__(self, message: Settled, *frames: bytes) -> tuple[Any, Any]:
        await self.raw([encode(message), *frames])
        received = await self._client.receive()
        if not frames:
            return received, None
        return received, await self._answer()

    async def _answer(self) -> Any:
        while isinstance(answer := from_client((await self._wire.recv_multipart())[1]), Ping):
            pass
        return answer


@asynccontextmanager
async def fake_server(
    landing: SegmentWriter | None,
) -> AsyncIterator[tuple[envs.EnvClient, ServersEnd]]:
    """A client, and the server's end of its connection."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as wire:
        wire.setsockopt(zmq.LINGER, 0)
        port = wire.bind_to_random_port("tcp://127.0.0.1")
        connecting = envs.connect(f"tcp://127.0.0.1:{port}", landing)
        entering = asyncio.ensure_future(connecting.__aenter__())
        peer, hello = await wire.recv_multipart()
        assert isinstance(from_client(hello), Hello)
        await wire.send_multipart([peer, encode(Welcome("env", 1))])
        client = await entering

        try:
            yield client, ServersEnd(wire, peer, client)
        finally:
            await connecting.__aexit__(None, None, None)


async def test_a_bad_frame_fails_its_rollout_only(tmp_path: Path) -> None:
    good = bytes(join(build({"a": [np.arange(500, dtype=np.int32)]})))
    size = len(good)
    damaged = good[:-1] + bytes([good[-1] ^ 1])
    with SegmentWriter(tmp_path, SegmentName("env.in", 0), 1 << 20) as landing:
        async with fake_server(landing) as (_, send):
            cases = {
                "missing": ([], "nothing arrived beside the record"),
                "short": ([good[:-64]], f"{size - 64} bytes arrived .* instead of {size}"),
                "empty": ([b""], "0 bytes arrived"),
                "damaged": ([damaged], "checksum"),
                "noise": ([bytes(size)], "not a blob"),
            }
            for name, (frames, error) in cases.items():
                received, answer = await send(settled(name, size), *frames)
                assert isinstance(received.outcome, Failed), name
                assert received.outcome.boundary == "worker"
                assert re.search(error, received.outcome.error), received.outcome.error
                if frames:
                    assert answer == FrameTaken(WorkerName("w0.0"), len(frames[0]))
            received, answer = await send(settled("good", size), good)
    assert isinstance(received.outcome, Scored)
    assert answer == FrameTaken(WorkerName("w0.0"), size)
    assert raw(tmp_path, received.outcome.ref) == good


async def test_a_client_that_cannot_write_a_frame_says_so(tmp_path: Path) -> None:
    good = bytes(join(build({"a": [np.arange(5, dtype=np.int32)]})))
    with SegmentWriter(tmp_path / "gone", SegmentName("env.in", 0), 1 << 20) as nowhere:
        for landing, error in ((None, "no place to write it"), (nowhere, "cannot write")):
            async with fake_server(landing) as (_, send):
                received, answer = await send(settled("r", len(good)), good)
                assert isinstance(received.outcome, Failed)
                assert error in received.outcome.error
                assert answer.num_bytes == len(good), "the worker is not kept waiting"
