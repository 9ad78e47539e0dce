"""Files of released segments are written anew, and nobody ever sees another segment's bytes for it."""

import asyncio
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import PayloadError
from rollway.payload.blob import Blob, build
from rollway.payload.in_use import SegmentKeeper
from rollway.payload.lock import share
from rollway.payload.reader import SegmentReader
from rollway.payload.reuse import drop_all, drop_spares, retire, take
from rollway.payload.scan import Recovered, WholeBlob, mapped, recover, scan
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import PayloadRef

pytestmark = pytest.mark.anyio


def blob_of(size: int, value: int = 1) -> Blob:
    return build({"a": [np.full(size, value, np.uint8)]})


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


async def released(folder: Path, sizes: tuple[int, ...] = (5000, 5000, 5000)) -> int:
    """A segment that was written, read and released; its inode."""
    with SegmentWriter(folder, "old.0", 1 << 20) as writer:
        refs = [await writer.append(blob_of(size, 9)) for size in sizes]
    reader, path = SegmentReader(folder), folder / refs[0].segment
    for ref in refs:
        reader.verify(ref)
    inode = path.stat().st_ino
    reader.remove(path.name)
    assert reader.segments() == []
    return inode


async def test_a_released_file_is_the_next_segments(tmp_path: Path) -> None:
    inode = await released(tmp_path)
    with SegmentWriter(tmp_path, "new.0", 1 << 20) as writer:
        ref = await writer.append(blob_of(100, 1))
        path = tmp_path / ref.segment
        assert path.stat().st_ino == inode
        assert path.stat().st_size > 15_000, "nothing is given back while it is written"
        assert set(SegmentReader(tmp_path).open(ref)["a"].tolist()) == {1}
    assert path.stat().st_size == ref.length, "a closed segment ends with its last blob"
    assert names(tmp_path) == [ref.segment]


@pytest.mark.parametrize("durability", ["process", "host"])
async def test_files_go_round_as_long_as_enough_are_released(tmp_path: Path, durability: str) -> None:
    inodes, reader = set(), SegmentReader(tmp_path)
    with SegmentWriter(tmp_path, "w.0", 1000, durability) as writer:  # type: ignore[arg-type]
        for n in range(20):
            ref = await writer.append(blob_of(1000, n))
            assert set(reader.open(ref)["a"].tolist()) == {n}
            reader.verify(ref)
            inodes.add((tmp_path / ref.segment).stat().st_ino)
            if n:
                reader.remove(f"w.0-{n - 1:04d}.seg")
    assert len(inodes) == 2


async def test_views_that_are_still_held_stay_what_they_were(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, "old.0", 1 << 20) as writer:
        ref = await writer.append(blob_of(1000, 7))
    held = SegmentReader(tmp_path).open(ref)["a"]
    SegmentReader(tmp_path).remove(ref.segment)
    with SegmentWriter(tmp_path, "new.0", 1 << 20) as writer:
        await writer.append(blob_of(5000, 8))
    assert set(held.tolist()) == {7}


async def test_whoever_opened_a_file_just_before_its_release_notices(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, "old.0", 1 << 20) as writer:
        ref = await writer.append(blob_of(1000))
    path = tmp_path / ref.segment
    with path.open("rb") as early:
        retire(path)
        with pytest.raises(FileNotFoundError):
            share(early.fileno(), path)
        assert take(tmp_path / "new.0-0000.seg")
        with pytest.raises(FileNotFoundError):
            share(early.fileno(), path)


async def test_bytes_that_never_reached_the_disk_are_not_taken_for_older_ones(tmp_path: Path) -> None:
    """After a loss of power a ref may point to what its file held before, of the very same size."""
    await released(tmp_path, (1000,))
    lost = PayloadRef("new.0-0000.seg", 0, blob_of(1000).length)
    assert take(tmp_path / lost.segment)
    for use in (SegmentReader(tmp_path).open, SegmentReader(tmp_path).verify):
        with pytest.raises(PayloadError, match="damaged: it is of another segment"):
            use(lost)


async def test_a_blob_from_a_wire_becomes_one_of_the_segment_it_lands_in(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, "there.0", 1 << 20) as writer:
        there = await writer.append(blob_of(100, 3))
    reader = SegmentReader(tmp_path)
    with SegmentWriter(tmp_path, "here.0", 1 << 20) as writer:
        here = await writer.append_whole(reader.copy(there))
    reader.verify(here)
    assert set(reader.open(here)["a"].tolist()) == {3}


KILLED = """
import asyncio, os, sys
from pathlib import Path
import numpy as np
from rollway.payload.blob import build
from rollway.payload.writer import SegmentWriter

async def main(folder):
    writer = SegmentWriter(folder, "new.0", 1 << 20)
    for n in range(2):
        await writer.append(build({"a": [np.full(3000, n, np.uint8)]}))
    os._exit(9)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_killed_writers_segment_keeps_its_own_blobs_alone(tmp_path: Path) -> None:
    asyncio.run(released(tmp_path))
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == 9
    path = tmp_path / "new.0-0000.seg"
    size, length = path.stat().st_size, blob_of(3000).length
    own = [
        one.offset for one in scan(mapped(path), path.name, verify=True) if isinstance(one, WholeBlob)
    ]
    assert own == [0, length + -length % 64]
    cut = size - own[1] - length
    assert cut > 5000, "an older blob lay whole behind them"
    assert recover(path) == Recovered(num_kept=2, num_broken=0, num_cut_bytes=cut)


async def test_a_segment_under_another_name_is_not_recovered_to_nothing(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, "w.0", 1 << 20) as writer:
        ref = await writer.append(blob_of(1000))
    path = (tmp_path / ref.segment).rename(tmp_path / "copy.seg")
    with pytest.raises(PayloadError, match=r"no whole blob of its own .* renamed"):
        recover(path)
    assert path.stat().st_size == ref.length


async def test_dropping_gives_space_back(tmp_path: Path) -> None:
    await released(tmp_path)
    with SegmentWriter(tmp_path, "w.0", 1) as writer:
        refs = [await writer.append(blob_of(10)) for _ in range(3)]
    retire(tmp_path / refs[0].segment)
    drop_spares(tmp_path)
    assert names(tmp_path) == [one.segment for one in refs[1:]]
    drop_all(tmp_path)
    assert names(tmp_path) == []


steps = st.lists(
    st.tuples(st.sampled_from(["append", "append", "release", "look"]), st.integers(0, 3000)),
    max_size=60,
)


@given(steps)
def test_what_is_held_is_always_what_was_written(plan: list[tuple[str, int]]) -> None:
    """Two writers, a keeper and a reader with views: in any order of theirs, every ref that is held
    verifies, and every view shows what it showed."""
    with TemporaryDirectory() as folder:
        asyncio.run(_play(Path(folder), plan))


async def _play(folder: Path, plan: list[tuple[str, int]]) -> None:
    keeper, reader = SegmentKeeper(SegmentReader(folder)), SegmentReader(folder)
    writers = [SegmentWriter(folder, f"w{n}.0", 4000) for n in range(2)]
    held: dict[PayloadRef, int] = {}
    seen: list[tuple[int, object]] = []
    for number, (what, size) in enumerate(plan):
        value = number % 256
        if what == "append":
            ref = await writers[size % 2].append(blob_of(size + 1, value))
            await keeper.hold(ref)
            held[ref] = value
        elif what == "release" and held:
            ref = list(held)[size % len(held)]
            del held[ref]
            reader.forget()
            await keeper.release([ref])
        elif what == "look" and held:
            ref = list(held)[size % len(held)]
            seen.append((held[ref], reader.open(ref)["a"]))
        for ref, value in held.items():
            reader.verify(ref)
            assert set(reader.open(ref)["a"].tolist()) == {value}
        for value, view in seen:
            assert set(view.tolist()) == {value}  # type: ignore[attr-defined]
    for writer in writers:
        writer.close()
