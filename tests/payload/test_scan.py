"""Whole blobs of a segment are found without refs, and a torn tail is cut."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.payload.columns import as_bytes, columns

from rollway.errors import PayloadError
from rollway.payload.blob import build, pad, parse, read_header
from rollway.payload.reader import SegmentReader
from rollway.payload.scan import (
    BrokenPiece,
    RecoveryReport,
    WholeBlob,
    map_segment,
    recover,
    scan,
    tail_offset,
)
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import PayloadRef, SegmentName

NAMELESS = ""


def lay_out(blobs: list[bytes]) -> tuple[bytearray, list[int]]:
    """Return the bytes of a segment with these blobs, and where each begins."""
    raw, offsets = bytearray(), []
    for blob in blobs:
        raw += bytes(pad(len(raw)))
        offsets.append(len(raw))
        raw += blob
    return raw, offsets


segments = st.lists(columns(), min_size=1, max_size=5).map(
    lambda all_columns: lay_out([as_bytes(build(columns)) for columns in all_columns])
)


@given(segments, st.booleans())
def test_every_blob_is_found_where_it_lies(
    segment: tuple[bytearray, list[int]], verify: bool
) -> None:
    raw, offsets = segment
    pieces = list(scan(memoryview(raw), NAMELESS, verify=verify))
    assert all(isinstance(piece, WholeBlob) for piece in pieces)
    assert [piece.offset for piece in pieces] == offsets
    assert tail_offset(pieces) == len(raw)
    for piece in pieces:
        parse(memoryview(raw)[piece.offset : piece.offset + piece.length])


@given(segments, st.data())
def test_a_cut_segment_keeps_its_whole_blobs(
    segment: tuple[bytearray, list[int]], data: st.DataObject
) -> None:
    raw, offsets = segment
    cut = data.draw(st.integers(0, len(raw)))
    ends = [read_header(memoryview(raw)[at:]).end + at for at in offsets]
    pieces = list(scan(memoryview(raw)[:cut], NAMELESS, verify=True))
    found = [piece.offset for piece in pieces if isinstance(piece, WholeBlob)]
    assert found == [at for at, end in zip(offsets, ends, strict=True) if end <= cut]
    assert tail_offset(pieces) == max((end for end in ends if end <= cut), default=0)


@given(segments, st.data())
def test_damage_to_one_blob_does_not_hide_the_blobs_behind_it(
    segment: tuple[bytearray, list[int]], data: st.DataObject
) -> None:
    """Whatever happens to one blob or its header, the others are still found."""
    raw, offsets = segment
    index = data.draw(st.integers(0, len(offsets) - 1))
    size = read_header(memoryview(raw)[offsets[index] :]).end
    at = offsets[index] + data.draw(st.integers(0, size - 1))
    noise = data.draw(st.binary(min_size=1, max_size=40))[: offsets[index] + size - at]
    before = bytes(raw)
    raw[at : at + len(noise)] = noise
    found = {
        piece.offset
        for piece in scan(memoryview(raw), NAMELESS, verify=True)
        if isinstance(piece, WholeBlob)
    }
    assert found >= set(offsets) - {offsets[index]}
    if bytes(raw) == before:
        assert found == set(offsets)


@given(st.binary(max_size=500))
def test_garbage_has_no_whole_blob(raw: bytes) -> None:
    pieces = list(scan(memoryview(raw), NAMELESS, verify=True))
    assert all(isinstance(piece, BrokenPiece) for piece in pieces)
    assert tail_offset(pieces) == 0


def test_recovering_cuts_the_tail_and_nothing_else(tmp_path: Path) -> None:
    blobs = [
        as_bytes(build({"a": [np.full(200, n, np.uint8)]}), "w.0-0000.seg") for n in range(4)
    ]
    raw, offsets = lay_out(blobs)
    raw[offsets[1] + 300] ^= 1  # one in the middle is damaged
    path = tmp_path / "w.0-0000.seg"
    path.write_bytes(raw[: offsets[3] + 50])
    assert recover(path) == RecoveryReport(
        num_kept=2, num_broken=1, num_cut_bytes=pad(len(blobs[2])) + 50
    )
    assert path.stat().st_size == offsets[2] + len(blobs[2])
    assert recover(path).num_cut_bytes == 0
    path.write_bytes(b"")
    assert recover(path) == RecoveryReport(0, 0, 0)
    with pytest.raises(PayloadError, match="cannot open segment"):
        recover(tmp_path / "none.seg")


@pytest.mark.anyio
async def test_a_segment_in_use_is_not_recovered(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, SegmentName("w", 0), segment_bytes=1 << 20) as writer:
        ref = await writer.append(build({"a": [np.ones(10, np.uint8)]}))
        with pytest.raises(PayloadError, match="is in use"):
            recover(tmp_path / ref.segment)


KILLED = """
import asyncio, sys
from pathlib import Path
import msgspec, numpy as np
from rollway.payload.blob import build
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import SegmentName

async def main(folder):
    with SegmentWriter(folder, SegmentName("w", 0), 1 << 40) as writer:
        for n in range(5):
            ref = await writer.append(build({"a": [np.full(10_000, n, np.uint8)]}))
            print(msgspec.json.encode(ref).decode(), flush=True)
        await writer.append(build({"a": [np.ones(1 << 16, np.uint8)] * 8192}))
        print("too late", flush=True)

asyncio.run(main(Path(sys.argv[1])))
"""


def _kill_while_writing(folder: Path) -> tuple[list[PayloadRef], bytes]:
    """Kill a writer in the middle of 512 MB; return the refs it had printed and its other output."""
    command = [sys.executable, "-c", KILLED, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        refs = [PayloadRef(**json.loads(writer.stdout.readline())) for _ in range(5)]
        path = folder / refs[0].segment
        committed = refs[-1].offset + refs[-1].length
        while path.stat().st_size < committed + (1 << 20):
            pass
        writer.kill()
        return refs, writer.stdout.read()


def test_a_killed_writer_loses_only_the_blob_it_was_writing(tmp_path: Path) -> None:
    refs, rest = _kill_while_writing(tmp_path)
    assert rest == b"", "it was killed before the last write was done"
    reader, path = SegmentReader(tmp_path), tmp_path / refs[0].segment
    for n, ref in enumerate(refs):
        reader.verify(ref)
        assert set(reader.open(ref)["a"].tolist()) == {n}
    assert isinstance(list(scan(map_segment(path), path.name))[-1], BrokenPiece)
    torn = path.stat().st_size - refs[-1].offset - refs[-1].length
    del reader  # its map would keep the segment in use
    assert recover(path) == RecoveryReport(num_kept=5, num_broken=0, num_cut_bytes=torn)
    found: list[Any] = list(scan(map_segment(path), path.name, verify=True))
    assert [(piece.offset, piece.length) for piece in found] == [
        (ref.offset, ref.length) for ref in refs
    ]
