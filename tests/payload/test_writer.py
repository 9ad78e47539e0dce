"""Segments are written in the thread lane and read as views; later failures never harm earlier blobs."""

import asyncio
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollway.errors import PayloadError
from rollway.payload.blob import ALIGN, Blob, build, join
from rollway.payload.lock import is_in_use
from rollway.payload.reader import SegmentReader
from rollway.payload.scan import WholeBlob, map_segment, scan
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import PayloadRef, SegmentName

pytestmark = pytest.mark.anyio


def blob_of(size: int, value: int = 1) -> Blob:
    return build({"a": [np.full(size, value, np.uint8)]})


@pytest.mark.parametrize("durability", ["process", "host"])
async def test_blobs_are_aligned_and_fill_several_segments(
    tmp_path: Path, durability: str
) -> None:
    blobs = [
        build({"a": [np.full((n + 1, 3), n, np.uint8)], "b": [np.arange(n, dtype=np.int32)]})
        for n in range(20)
    ]
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1000, durability) as writer:  # type: ignore[arg-type]
        refs = [await writer.append(blob) for blob in blobs]
    assert len({ref.segment for ref in refs}) > 2, "segments rotate by size"
    assert all(ref.offset % ALIGN == 0 for ref in refs)
    reader = SegmentReader(tmp_path)
    for n, ref in enumerate(refs):
        opened = reader.open(ref)
        assert opened["a"].tolist() == [[n] * 3] * (n + 1)
        assert opened["b"].tolist() == list(range(n))
        reader.verify(ref)


async def test_host_durability_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each append syncs its file, and a new segment its folder, before the ref is returned."""
    synced: list[str] = []

    def sync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))

    monkeypatch.setattr("os.fdatasync", sync)
    monkeypatch.setattr("os.fsync", sync)
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20, "host") as writer:
        ref = await writer.append(blob_of(10))
        assert synced == [str(tmp_path), str(tmp_path / ref.segment)]
        await writer.append(blob_of(10))
        assert synced[2:] == [str(tmp_path / ref.segment)]
    with SegmentWriter(tmp_path, SegmentName("v", 0), 1 << 20) as writer:
        await writer.append(blob_of(10))
    assert len(synced) == 3, "durability 'process' syncs nothing"


async def test_after_a_failed_sync_a_new_segment_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20, "host") as writer:
        first = await writer.append(blob_of(10))
        with monkeypatch.context() as patched:
            patched.setattr("os.fdatasync", lambda file: os.fsync(1 << 20))
            with pytest.raises(PayloadError, match="healthy disk"):
                await writer.append(blob_of(10))
        second = await writer.append(blob_of(10))
    assert first.segment != second.segment
    for ref in (first, second):
        SegmentReader(tmp_path).verify(ref)
    assert (
        len(list(scan(map_segment(tmp_path / first.segment), first.segment, verify=True)))
        == 1
    )


async def test_a_reader_sees_blobs_appended_after_it_mapped_the_segment(
    tmp_path: Path,
) -> None:
    reader = SegmentReader(tmp_path)
    with SegmentWriter(tmp_path, SegmentName("w", 0), segment_bytes=1 << 20) as writer:
        for n in range(3):
            ref = await writer.append(blob_of(100, n))
            assert reader.open(ref)["a"][0] == n


async def test_many_chunks_are_written_without_joining(tmp_path: Path) -> None:
    chunks = [np.full(3, n % 256, np.uint8) for n in range(5000)]
    with SegmentWriter(tmp_path, SegmentName("w", 0), segment_bytes=1 << 20) as writer:
        ref = await writer.append(build({"a": chunks}))
    np.testing.assert_array_equal(
        SegmentReader(tmp_path).open(ref)["a"], np.concatenate(chunks)
    )


async def test_a_cancelled_append_never_touches_another_rollouts_bytes(
    tmp_path: Path,
) -> None:
    big = build({"a": [np.ones(1 << 16, np.uint8)] * 2000})
    with SegmentWriter(tmp_path, SegmentName("w", 0), segment_bytes=1 << 30) as writer:
        cancelled = asyncio.create_task(writer.append(big))
        await asyncio.sleep(0)
        cancelled.cancel()
        ref = await writer.append(blob_of(3, 7))
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert SegmentReader(tmp_path).open(ref)["a"].tolist() == [7, 7, 7]
        assert ref.offset >= big.length


async def test_missing_short_and_damaged_segments_are_named(tmp_path: Path) -> None:
    reader = SegmentReader(tmp_path)
    with pytest.raises(
        PayloadError, match=r"segment .*none\.0-0000\.seg .*removed by hand.*--resume"
    ):
        reader.open(PayloadRef("none.0-0000.seg", 0, 10))
    with SegmentWriter(tmp_path, SegmentName("w", 0), segment_bytes=1 << 20) as writer:
        refs = [await writer.append(blob_of(1000, n)) for n in range(2)]
    path = tmp_path / refs[0].segment
    raw = bytearray(path.read_bytes())
    raw[refs[1].offset + 500] ^= 1
    path.write_bytes(raw)
    reader.open(refs[1])
    reader.verify(refs[0])
    with pytest.raises(
        PayloadError, match=rf"offset {refs[1].offset} of {path} .*checksum.*--resume"
    ):
        reader.verify(refs[1])
    with pytest.raises(PayloadError, match=rf"offset 64 of {path} is damaged: its header"):
        reader.open(PayloadRef(path.name, 64, 1000))
    os.truncate(path, refs[1].offset + 10)
    with pytest.raises(PayloadError, match=rf"ref at {refs[1].offset} ends at .* was cut"):
        SegmentReader(tmp_path).open(refs[1])


async def test_a_file_that_reaches_its_size_limit_loses_nothing(tmp_path: Path) -> None:
    """A blob that fails with EFBIG half way is cut off, and the next append takes its place."""
    with SegmentWriter(tmp_path, SegmentName("w", 0), segment_bytes=1 << 20) as writer:
        first = await writer.append(blob_of(10))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(
                PayloadError, match=r"cannot write 10\d+ bytes to .*seg: .*make room"
            ):
                await writer.append(blob_of(100_000))
            size = (tmp_path / first.segment).stat().st_size
            second = await writer.append(blob_of(20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        third = await writer.append(blob_of(100_000))
    assert size == first.length
    pieces = list(scan(map_segment(tmp_path / first.segment), first.segment, verify=True))
    assert [
        (piece.offset, piece.length) for piece in pieces if isinstance(piece, WholeBlob)
    ] == [(ref.offset, ref.length) for ref in (first, second, third)]
    assert len(pieces) == 3


TINY_DISK = """
import asyncio, os, sys
from pathlib import Path
import numpy as np
from rollway.errors import PayloadError
from rollway.payload.blob import build
from rollway.payload.reader import SegmentReader
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import SegmentName

async def main(folder):
    blob = build({"a": [np.ones(300_000, np.uint8)]})
    refs = []
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(100_000))
    with SegmentWriter(folder, SegmentName("w", 0), 1 << 30) as writer:
        while True:
            try:
                refs.append(await writer.append(blob))
            except PayloadError as error:
                print(error)
                break
        ballast.unlink()
        refs.append(await writer.append(build({"a": [np.ones(90_000, np.uint8)]})))
    for ref in refs:
        SegmentReader(folder).verify(ref)
    print(len(refs), "whole")

asyncio.run(main(Path(sys.argv[1])))
"""


def tiny_disk(folder: Path) -> list[str]:
    """Return a command prefix that mounts a file system of 1 MB on `folder`."""
    mount = f'mount -t tmpfs -o size=1m none {folder} && exec "$@"'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]


def test_a_full_disk_loses_nothing_and_writing_works_again_after_making_room(
    tmp_path: Path,
) -> None:
    if (
        not shutil.which("unshare")
        or subprocess.run([*tiny_disk(tmp_path), "true"]).returncode
    ):
        pytest.skip("a tiny file system cannot be mounted on this machine")
    ran = subprocess.run(
        [*tiny_disk(tmp_path), sys.executable, "-c", TINY_DISK, str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    error, count = ran.stdout.splitlines()
    assert "No space left on device" in error
    assert "make room" in error
    assert count == "4 whole"


async def test_a_missing_folder_fails_the_append_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "payload"
    with SegmentWriter(folder, SegmentName("w", 0), segment_bytes=1) as writer:
        with pytest.raises(
            PayloadError, match=rf"bytes to {folder}/w.*: No such file .*folder exists"
        ):
            await writer.append(blob_of(10))
        folder.mkdir()
        assert (await writer.append(blob_of(10))).segment == "w.0-0000.seg"
        assert (await writer.append(blob_of(10))).segment == "w.0-0001.seg"


async def test_a_segment_is_locked_while_it_is_in_use(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, SegmentName("w", 0), segment_bytes=1) as writer:
        old = await writer.append(blob_of(10))
        new = await writer.append(blob_of(10))
        assert [is_in_use(tmp_path / ref.segment) for ref in (old, new)] == [False, True]
    assert not is_in_use(tmp_path / new.segment)


async def test_a_blob_from_a_wire_is_checked_before_it_is_written(tmp_path: Path) -> None:
    frame = bytearray(join(blob_of(100)))
    with SegmentWriter(tmp_path, SegmentName("w", 0), segment_bytes=1 << 20) as writer:
        ref = await writer.append_frame(memoryview(frame))
        frame[-1] ^= 1
        with pytest.raises(PayloadError, match="checksum"):
            await writer.append_frame(memoryview(frame))
        again = await writer.append(blob_of(100))
    assert again.offset == ref.length + -ref.length % ALIGN, "the refused blob took no space"


async def test_segments_of_an_earlier_writer_of_the_same_name_stay(
    tmp_path: Path,
) -> None:
    refs = []
    for value in range(3):
        with SegmentWriter(tmp_path, SegmentName("w", 0), 1 << 20) as writer:
            refs.append(await writer.append(blob_of(10, value)))
    assert [ref.segment for ref in refs] == ["w.0-0000.seg", "w.0-0001.seg", "w.0-0002.seg"]
    opened = [SegmentReader(tmp_path).open(ref)["a"][0] for ref in refs]
    assert opened == [0, 1, 2]
