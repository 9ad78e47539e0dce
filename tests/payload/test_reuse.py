"""Files of released segments are reused, and no reader ever sees another segment's bytes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import PayloadError
from rollway.payload.blob import Blob, build
from rollway.payload.in_use import SegmentKeeper
from rollway.payload.lock import lock_shared, open_exclusively
from rollway.payload.reader import SegmentReader
from rollway.payload.reuse import (
    SPARES,
    make_spare,
    remove_segments,
    remove_spares,
    take_spare,
)
from rollway.payload.scan import RecoveryReport, WholeBlob, map_segment, recover, scan
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import PayloadRef, SegmentName

pytestmark = pytest.mark.anyio


def blob_of(size: int, value: int = 1) -> Blob:
    return build({"a": [np.full(size, value, np.uint8)]})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


async def release_a_segment(folder: Path, sizes: tuple[int, ...] = (5000, 5000, 5000)) -> int:
    """Write, read and release a segment; return the inode of its file."""
    with SegmentWriter(folder, SegmentName("old", 0), 1 << 20) as writer:
        refs = [await writer.append(blob_of(size, 9)) for size in sizes]
    reader, path = SegmentReader(folder), folder / refs[0].segment
    for ref in refs:
        reader.verify(ref)
    inode = path.stat().st_ino
    reader.remove(path.name)
    assert reader.segments() == []
    return inode


async def test_a_new_segment_takes_over_a_released_file(tmp_path: Path) -> None:
    inode = await release_a_segment(tmp_path)
    with SegmentWriter(tmp_path, SegmentName("new", 0), 1 << 20) as writer:
        ref = await writer.append(blob_of(100, 1))
        path = tmp_path / ref.segment
        assert path.stat().st_ino == inode
        assert path.stat().st_size > 15_000, "the file keeps its size while it is written"
        assert set(SegmentReader(tmp_path).open(ref)["a"].tolist()) == {1}
    assert path.stat().st_size == ref.length, "a closed segment ends with its last blob"
    assert names(tmp_path) == [ref.segment]


@pytest.mark.parametrize("durability", ["process", "host"])
async def test_two_files_are_enough_while_segments_are_released(
    tmp_path: Path, durability: str
) -> None:
    inodes, reader = set(), SegmentReader(tmp_path)
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1000, durability) as writer:  # type: ignore[arg-type]
        for n in range(20):
            ref = await writer.append(blob_of(1000, n))
            assert set(reader.open(ref)["a"].tolist()) == {n}
            reader.verify(ref)
            inodes.add((tmp_path / ref.segment).stat().st_ino)
            if n:
                reader.remove(f"w.0-{n - 1:04d}.seg")
    assert len(inodes) == 2


async def test_views_of_a_removed_segment_keep_their_bytes(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, SegmentName("old", 0), 1 << 20) as writer:
        ref = await writer.append(blob_of(1000, 7))
    held = SegmentReader(tmp_path).open(ref)["a"]
    SegmentReader(tmp_path).remove(ref.segment)
    with SegmentWriter(tmp_path, SegmentName("new", 0), 1 << 20) as writer:
        await writer.append(blob_of(5000, 8))
    assert set(held.tolist()) == {7}


async def test_a_reader_that_opened_a_file_just_before_its_release_notices(
    tmp_path: Path,
) -> None:
    with SegmentWriter(tmp_path, SegmentName("old", 0), 1 << 20) as writer:
        ref = await writer.append(blob_of(1000))
    path = tmp_path / ref.segment
    with path.open("rb") as early:
        make_spare(path)
        with pytest.raises(FileNotFoundError):
            lock_shared(early.fileno(), path)
        assert take_spare(tmp_path / "new.0-0000.seg")
        with pytest.raises(FileNotFoundError):
            lock_shared(early.fileno(), path)


async def test_an_error_while_a_segment_is_locked_is_not_one_of_its_lock(
    tmp_path: Path,
) -> None:
    path = tmp_path / "w.0-0000.seg"
    path.touch()
    with (
        pytest.raises(OSError, match="no space left"),
        open_exclusively(path, os.O_RDWR),
    ):
        raise OSError("no space left")
    (tmp_path / SPARES).touch()
    make_spare(path)
    assert not path.exists(), "it cannot be renamed, so it is removed"


async def test_older_bytes_are_not_taken_for_a_blob_that_never_reached_the_disk(
    tmp_path: Path,
) -> None:
    """After a power failure a ref may point to an older blob of the same size in the reused file."""
    await release_a_segment(tmp_path, (1000,))
    lost = PayloadRef("new.0-0000.seg", 0, blob_of(1000).length)
    assert take_spare(tmp_path / lost.segment)
    for use in (SegmentReader(tmp_path).open, SegmentReader(tmp_path).verify):
        with pytest.raises(PayloadError, match="damaged: it belongs to another segment"):
            use(lost)


async def test_a_blob_from_a_wire_gets_the_mark_of_the_segment_it_is_written_to(
    tmp_path: Path,
) -> None:
    with SegmentWriter(tmp_path, SegmentName("there", 0), 1 << 20) as writer:
        there = await writer.append(blob_of(100, 3))
    reader = SegmentReader(tmp_path)
    with SegmentWriter(tmp_path, SegmentName("here", 0), 1 << 20) as writer:
        here = await writer.append_frame(reader.copy(there))
    reader.verify(here)
    assert set(reader.open(here)["a"].tolist()) == {3}


KILLED = """
import asyncio, os, sys
from pathlib import Path
import numpy as np
from rollway.payload.blob import build
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import SegmentName

async def main(folder):
    writer = SegmentWriter(folder, SegmentName("new", 0), 1 << 20)
    for n in range(2):
        await writer.append(build({"a": [np.full(3000, n, np.uint8)]}))
    os._exit(9)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_recovering_keeps_only_the_blobs_of_the_killed_writer(tmp_path: Path) -> None:
    asyncio.run(release_a_segment(tmp_path))
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == 9
    path = tmp_path / "new.0-0000.seg"
    size, length = path.stat().st_size, blob_of(3000).length
    own = [
        piece.offset
        for piece in scan(map_segment(path), path.name, verify=True)
        if isinstance(piece, WholeBlob)
    ]
    assert own == [0, length + -length % 64]
    cut = size - own[1] - length
    assert cut > 5000, "an older blob lay whole behind them"
    assert recover(path) == RecoveryReport(num_kept=2, num_broken=0, num_cut_bytes=cut)


async def test_recovering_a_renamed_segment_is_refused_and_removes_nothing(
    tmp_path: Path,
) -> None:
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20) as writer:
        ref = await writer.append(blob_of(1000))
    path = (tmp_path / ref.segment).rename(tmp_path / "copy.seg")
    with pytest.raises(PayloadError, match=r"belongs to that segment; was the file renamed"):
        recover(path)
    assert path.stat().st_size == ref.length


async def test_removing_spares_and_segments(tmp_path: Path) -> None:
    await release_a_segment(tmp_path)
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1) as writer:
        refs = [await writer.append(blob_of(10)) for _ in range(3)]
    make_spare(tmp_path / refs[0].segment)
    remove_spares(tmp_path)
    assert names(tmp_path) == [ref.segment for ref in refs[1:]]
    remove_segments(tmp_path)
    assert names(tmp_path) == []


steps = st.lists(
    st.tuples(st.sampled_from(["append", "append", "release", "look"]), st.integers(0, 3000)),
    max_size=60,
)


@given(steps)
def test_refs_in_use_always_read_what_was_written(plan: list[tuple[str, int]]) -> None:
    """Two writers, a keeper and a reader act in any order: every ref in use verifies, and every view
    keeps its bytes."""
    with TemporaryDirectory() as folder:
        asyncio.run(_play(Path(folder), plan))


async def _insist(what: str, call: Callable[[], None]) -> None:
    call()


async def _play(folder: Path, plan: list[tuple[str, int]]) -> None:
    keeper = SegmentKeeper(SegmentReader(folder), _insist)
    reader = SegmentReader(folder)
    writers = [SegmentWriter(folder, SegmentName(f"w{n}", 0), 4000) for n in range(2)]
    held: dict[PayloadRef, int] = {}
    seen: list[tuple[int, object]] = []
    for number, (act, size) in enumerate(plan):
        value = number % 256
        if act == "append":
            ref = await writers[size % 2].append(blob_of(size + 1, value))
            await keeper.hold(ref)
            held[ref] = value
        elif act == "release" and held:
            ref = list(held)[size % len(held)]
            del held[ref]
            reader = SegmentReader(folder)  # its maps would keep files in use
            await keeper.release([ref])
        elif act == "look" and held:
            ref = list(held)[size % len(held)]
            seen.append((held[ref], reader.open(ref)["a"]))
        for ref, value in held.items():
            reader.verify(ref)
            assert set(reader.open(ref)["a"].tolist()) == {value}
        for value, view in seen:
            assert set(view.tolist()) == {value}  # type: ignore[attr-defined]
    for writer in writers:
        writer.close()
