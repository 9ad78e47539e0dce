"""Routes of running rollouts are kept in files, and what is committed equals what memory would hold."""

import asyncio
import errno
import os
import resource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trace.test_trace import conversations, joined, routes_start, turn

from rollway.errors import PayloadError
from rollway.payload.blob import TEXT, Column, row_columns
from rollway.payload.reader import SegmentReader
from rollway.payload.reuse import SPARES
from rollway.payload.scan import WholeBlob, map_segment, scan
from rollway.payload.spool import HEAD_BYTES, Spool, remove_spools
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import SegmentName
from rollway.records.turn import SpooledRoutes
from rollway.trace.routes import RouteChunk
from rollway.trace.row import Row
from rollway.trace.trace import Trace

pytestmark = pytest.mark.anyio


def files_of(folder: Path) -> dict[str, int]:
    """Return the inode of each file."""
    return {path.name: path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


Talk = list[tuple[int, list[int], list[int], bool]]


async def spool_now(trace: Trace, spool: Spool) -> None:
    chunks = trace.loose_routes()
    trace.spooled(chunks, await spool.append([chunk.in_memory for chunk in chunks]))


def columns_of(rows: tuple[Row, ...], text: bytes = b"[1]") -> dict[str, Column]:
    return {
        **row_columns(row.columns() for row in rows),
        TEXT: [np.frombuffer(text, np.uint8)],
    }


async def play(talk: Talk, spooling: list[bool], dtype: Any, folder: Path) -> bool:
    """Trace a conversation twice, once with a spool; store it, and compare. Return whether the spool
    became the segment."""
    plain, trace, rng = Trace(), Trace(), np.random.default_rng(0)
    history: dict[int, list[int]] = {}
    with SegmentWriter(folder, SegmentName("w", 0), 1 << 20) as writer:
        spool = writer.new_spool()
        writing: tuple[list[RouteChunk], list[SpooledRoutes]] | None = None
        for (agent, new, drawn, compact), now in zip(talk, spooling, strict=True):
            prompt = ([agent] if compact or agent not in history else history[agent]) + new
            history[agent] = prompt + drawn
            start = routes_start(plain, np.array(prompt, np.int32))
            shape = (len(prompt) + len(drawn) - 1 - start, 2, 3)
            routes = rng.integers(0, 256, shape, dtype)
            plain.add(turn(prompt, drawn, routes=routes, start=start))
            trace.add(turn(prompt, drawn, routes=routes.copy(), start=start))
            if writing is not None:  # since before this turn
                chunks, places = writing
                trace.spooled(chunks, places)
                writing = None
            if now:
                chunks = trace.loose_routes()
                writing = chunks, await spool.append([chunk.in_memory for chunk in chunks])
        if writing is not None:
            trace.spooled(*writing)
            assert trace.num_loose_bytes == 0
        expected, rows = plain.finish(), trace.finish()
        stored = await writer.store(columns_of(rows), spool)
        was_adopted = any(spooling) and not spool.num_bytes
        await spool.discard()
        reader = SegmentReader(folder)
        reader.verify(stored.ref)
        found = reader.open(stored.ref)
        for number, row in enumerate(expected):
            for name in row.columns():
                column = found[f"row{number}.{name}"]
                assert column.tobytes() == joined(row, name).tobytes()
                assert column.dtype == joined(row, name).dtype
        assert found[TEXT].tobytes().rstrip() == b"[1]"
        (piece,) = scan(
            map_segment(folder / stored.ref.segment), stored.ref.segment, verify=True
        )
        assert isinstance(piece, WholeBlob)
        assert (piece.offset, piece.length) == (stored.ref.offset, stored.ref.length)
    return was_adopted


@given(conversations(), st.data(), st.sampled_from([np.uint8, np.uint16]))
def test_what_was_spooled_equals_what_memory_would_hold(
    talk: Talk, data: st.DataObject, dtype: Any
) -> None:
    """Agents take turns, compact their history, and routes are spooled now and then, while the next turn
    is added. If one agent speaks alone, its rows lie one behind the other, and the spool becomes the
    segment."""
    spooling = data.draw(st.lists(st.booleans(), min_size=len(talk), max_size=len(talk)))
    with TemporaryDirectory() as folder:
        was_adopted = asyncio.run(play(talk, spooling, dtype, Path(folder)))
        left = sorted(path.suffix or path.name for path in Path(folder).iterdir())
    is_alone = len({agent for agent, *_ in talk}) == 1
    if is_alone and any(spooling) and dtype == np.uint8:
        assert was_adopted
    has_spare = any(spooling) and not was_adopted
    assert left == [".seg", *([SPARES] if has_spare else [])]


def routes_of(num_tokens: int, value: int = 1) -> Any:
    return np.full((num_tokens, 4, 8), value, np.uint8)


async def test_more_rows_than_the_header_has_room_for_are_copied(tmp_path: Path) -> None:
    trace = Trace()
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20) as writer:
        spool = writer.new_spool()
        for n in range(HEAD_BYTES // 400):
            trace.add(turn([n], [n], routes=routes_of(1, n % 256)))
            await spool_now(trace, spool)
        rows = trace.finish()
        stored = await writer.store(columns_of(rows), spool)
    found = SegmentReader(tmp_path).open(stored.ref)
    assert all(found[f"row{n}.routes"][0, 0, 0] == n % 256 for n in range(len(rows)))


async def test_a_spool_that_ended_takes_nothing_and_its_space_is_used_again(
    tmp_path: Path,
) -> None:
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20) as writer:
        first, second = writer.new_spool(), writer.new_spool()
        await first.append([routes_of(1000)])
        (inode,) = files_of(tmp_path).values()
        await first.discard()
        with pytest.raises(PayloadError, match="has ended"):
            await first.append([routes_of(1)])
        await second.append([routes_of(10)])
        assert [*files_of(tmp_path).values()] == [inode]
        await second.discard()


async def test_spools_of_a_killed_worker_are_removed_and_those_of_others_stay(
    tmp_path: Path,
) -> None:
    with (
        SegmentWriter(tmp_path, SegmentName("env.w1", 0), 1 << 20) as dead,
        SegmentWriter(tmp_path, SegmentName("env.w10", 0), 1 << 20) as other,
    ):
        for writer in (dead, other):
            await writer.new_spool().append([routes_of(1)])
    remove_spools(tmp_path, "env.w1.")
    assert [*files_of(tmp_path)] == ["env.w10.0-1.spool"]


async def test_a_write_that_fails_leaves_the_spool_as_it_was(tmp_path: Path) -> None:
    """The limit of file sizes stands in for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trace = Trace()
    trace.add(turn([1], [2, 3], routes=routes_of(2, 5)))
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20) as writer:
        spool = writer.new_spool()
        await spool_now(trace, spool)
        trace.add(turn([1, 2, 3, 4], [5], routes=routes_of(2, 6), start=2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (HEAD_BYTES + 70, before[1]))
        try:
            with pytest.raises(OSError, match="too large") as caught:
                await spool_now(trace, spool)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.errno == errno.EFBIG
        assert trace.num_loose_bytes == 64
        stored = await writer.store(columns_of(trace.finish()), spool)
    assert os.listdir(tmp_path) == [stored.ref.segment]
    found = SegmentReader(tmp_path).open(stored.ref)["row0.routes"]
    assert found[:, 0, 0].tolist() == [5, 5, 6, 6, 0]


async def test_a_spool_is_given_away_only_once_its_writes_have_ended(tmp_path: Path) -> None:
    """A rollout may be cancelled while its routes are written. Another one then uses the same file."""
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20) as writer:
        for _ in range(20):
            cancelled, other = writer.new_spool(), writer.new_spool()
            writing = asyncio.create_task(cancelled.append([routes_of(100_000, 9)]))
            await asyncio.sleep(0.01)  # the thread writes now, or has just written
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await cancelled.discard()
            await other.append([routes_of(1000, 1)])
            with other.read() as spooled:
                assert bytes(spooled) == bytes([1]) * len(spooled)
            await other.discard()


async def test_a_spool_whose_first_write_fails_leaves_no_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20) as writer:
        spool = writer.new_spool()
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                await spool.append([routes_of(100)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await spool.discard()
    assert os.listdir(tmp_path) == [SPARES]
