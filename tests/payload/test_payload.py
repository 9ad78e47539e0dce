"""Blobs in segments: written in pieces, read as views, opened by safetensors itself."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import PayloadError
from rollway.payload.blob import ALIGN, build, parse
from rollway.payload.reader import SegmentReader
from rollway.payload.release import LiveRefs
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import PayloadRef

DTYPES = [np.uint8, np.uint16, np.int32, np.float32]


@st.composite
def columns(draw: st.DrawFn) -> dict[str, list[Any]]:
    """Columns of any dtype, shape and number of chunks, empty chunks too."""
    built = {}
    for index in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        tail = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        built[f"row0.c{index}"] = [
            np.arange(np.prod((size, *tail)), dtype=dtype).reshape(size, *tail) for size in sizes
        ]
    return built


def as_bytes(blob: Any) -> bytes:
    return b"".join(blob.parts)


@given(columns())
def test_a_blob_is_a_safetensors_file(given_columns: dict[str, list[Any]]) -> None:
    blob = build(given_columns)
    raw = as_bytes(blob)
    assert len(raw) == blob.length
    opened = safetensors.numpy.load(raw)
    assert opened.keys() == given_columns.keys()
    for name, chunks in given_columns.items():
        np.testing.assert_array_equal(opened[name], np.concatenate(chunks))


@given(columns())
def test_parsing_gives_back_what_was_built(given_columns: dict[str, list[Any]]) -> None:
    for name, column in parse(memoryview(as_bytes(build(given_columns)))).items():
        whole = np.concatenate(given_columns[name])
        assert column.dtype == whole.dtype
        np.testing.assert_array_equal(column, whole)


@given(columns(), st.data())
def test_damaged_blobs_are_refused_or_harmless(cols: dict[str, list[Any]], data: st.DataObject) -> None:
    raw = bytearray(as_bytes(build(cols)))
    cut = data.draw(st.integers(0, len(raw) - 1))
    try:
        parse(memoryview(raw[:cut]))
    except PayloadError:
        return
    assert cut >= 8, "something was opened that had no header"


@pytest.mark.anyio
async def test_refs_are_aligned_rotate_and_reopen(tmp_path: Path) -> None:
    blobs = [
        build({"a": [np.full((n + 1, 3), n, np.uint8)], "b": [np.arange(n, dtype=np.int32)]})
        for n in range(20)
    ]
    with SegmentWriter(tmp_path, "w.0", segment_bytes=1000) as writer:
        refs = [await writer.append(blob) for blob in blobs]
    assert len({ref.segment for ref in refs}) > 2, "segments rotate by size"
    assert all(ref.offset % ALIGN == 0 for ref in refs)
    reader = SegmentReader(tmp_path)
    for n, ref in enumerate(refs):
        opened = reader.open(ref)
        assert opened["a"].tolist() == [[n] * 3] * (n + 1)
        assert opened["b"].tolist() == list(range(n))


@pytest.mark.anyio
async def test_a_reader_sees_what_was_appended_after_it_mapped(tmp_path: Path) -> None:
    reader = SegmentReader(tmp_path)
    with SegmentWriter(tmp_path, "w.0", segment_bytes=1 << 20) as writer:
        for n in range(3):
            ref = await writer.append(build({"a": [np.full(100, n, np.uint8)]}))
            assert reader.open(ref)["a"][0] == n


@pytest.mark.anyio
async def test_many_chunks_are_written_without_joining(tmp_path: Path) -> None:
    chunks = [np.full(3, n % 256, np.uint8) for n in range(5000)]
    with SegmentWriter(tmp_path, "w.0", segment_bytes=1 << 20) as writer:
        ref = await writer.append(build({"a": chunks}))
    np.testing.assert_array_equal(SegmentReader(tmp_path).open(ref)["a"], np.concatenate(chunks))


@pytest.mark.anyio
async def test_a_cancelled_append_never_touches_another_rollouts_bytes(tmp_path: Path) -> None:
    big = build({"a": [np.ones(1 << 16, np.uint8)] * 2000})
    with SegmentWriter(tmp_path, "w.0", segment_bytes=1 << 30) as writer:
        cancelled = asyncio.create_task(writer.append(big))
        await asyncio.sleep(0)
        cancelled.cancel()
        ref = await writer.append(build({"a": [np.full(3, 7, np.uint8)]}))
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert SegmentReader(tmp_path).open(ref)["a"].tolist() == [7, 7, 7]
        assert ref.offset >= big.length


def test_missing_and_short_segments_are_named(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match=r"cannot open segment .*none\.0-0000\.seg"):
        SegmentReader(tmp_path).open(PayloadRef("none.0-0000.seg", 0, 10))
    (tmp_path / "w.0-0000.seg").write_bytes(b"x" * 100)
    with pytest.raises(PayloadError, match="has 100 bytes, the ref ends at 200"):
        SegmentReader(tmp_path).open(PayloadRef("w.0-0000.seg", 100, 100))


@pytest.mark.anyio
async def test_a_full_disk_says_so_and_keeps_what_was_written(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, "w.0", segment_bytes=1 << 20) as writer:
        ref = await writer.append(build({"a": [np.ones(10, np.uint8)]}))
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(PayloadError, match="cannot write"):
                await writer.append(build({"a": [np.ones(100_000, np.uint8)]}))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert SegmentReader(tmp_path).open(ref)["a"].tolist() == [1] * 10


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=40), st.randoms())
def test_a_segment_goes_only_when_closed_and_unused(steps: list[tuple[int, bool]], random: Any) -> None:
    """Random writers rotate and refs are released in any order: no live ref loses its segment."""
    live = LiveRefs()
    held: list[PayloadRef] = []
    newest = {0: 0, 1: 0}
    offsets = {0: 0, 1: 0}
    gone: set[str] = set()
    for writer, rotate in steps:
        newest[writer] += rotate
        offsets[writer] += ALIGN
        ref = PayloadRef(f"w{writer}.0-{newest[writer]:04d}.seg", offsets[writer], 10)
        gone |= set(live.hold(ref))
        held.append(ref)
        if random.random() < 0.6:
            done = held.pop(random.randrange(len(held)))
            gone |= set(live.release(done))
        assert live.num_bytes == 10 * len(held)
        assert not gone & {ref.segment for ref in held}
    for ref in held:
        gone |= set(live.release(ref))
    assert live.num_bytes == 0
    current = {f"w{writer}.0-{newest[writer]:04d}.seg" for writer in newest}
    assert not gone & current, "an open segment stays"


def test_a_restarted_worker_closes_the_segments_of_its_past() -> None:
    live = LiveRefs()
    old = PayloadRef("w0.0-0003.seg", 0, 10)
    live.hold(old)
    assert live.release(old) == []
    assert live.hold(PayloadRef("w0.1-0000.seg", 0, 10)) == ["w0.0-0003.seg"]


def test_a_ref_is_released_once() -> None:
    live = LiveRefs()
    ref = PayloadRef("w0.0-0000.seg", 0, 10)
    live.hold(ref)
    live.release(ref)
    with pytest.raises(PayloadError):
        live.release(ref)
