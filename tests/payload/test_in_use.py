"""A segment is removed once it is closed and unused. No ref in use ever loses its bytes."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import PayloadError
from rollway.observe.upkeep import Upkeep
from rollway.payload.blob import ALIGN
from rollway.payload.in_use import LiveRefs, SegmentKeeper
from rollway.payload.reader import SegmentReader
from rollway.records.payload import PayloadRef, SegmentName


class Disk:
    """Two workers that write, begin new segments, die and are restarted, and the files on their disk."""

    def __init__(self) -> None:
        self.live = LiveRefs()
        self.files: set[str] = set()
        self.held: list[PayloadRef] = []
        self.incarnation, self.number, self.end = [0, 0], [0, 0], [0, 0]

    def name(self, worker: int) -> str:
        return f"env.w{worker}.{self.incarnation[worker]}-{self.number[worker]:04d}.seg"

    def write(self, worker: int, *, is_sent: bool) -> None:
        """Write a blob. Its worker may die, or its rollout be cancelled, before its ref is sent."""
        self.files.add(self.name(worker))
        self.end[worker] += ALIGN
        if is_sent:
            ref = PayloadRef(self.name(worker), self.end[worker], 10)
            self.held.append(ref)
            if self.live.hold(ref):
                self.files -= set(self.live.unused(self.files))

    def release(self, index: int) -> None:
        ref = self.held.pop(index)
        if self.live.release(ref):
            self.files.remove(ref.segment)


ACTS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "unsent", "rotate", "restart", "release"]),
              st.integers(0, 1), st.integers(0, 1000)),
    max_size=60,
)  # fmt: skip


@given(ACTS)
def test_a_segment_is_removed_once_it_is_closed_and_unused(
    acts: list[tuple[str, int, int]],
) -> None:
    disk = Disk()
    for act, worker, number in acts:
        match act:
            case "write" | "unsent":
                disk.write(worker, is_sent=act == "write")
            case "rotate":
                disk.number[worker] += 1
            case "restart":
                disk.incarnation[worker] += 1
                disk.number[worker] = 0
            case "release" if disk.held:
                disk.release(number % len(disk.held))
        assert {ref.segment for ref in disk.held} <= disk.files, "a live ref lost its segment"
        assert disk.live.num_bytes == 10 * len(disk.held)
    for worker in (0, 1):  # both write once more, then everything is trained
        disk.number[worker] += 1
        disk.write(worker, is_sent=True)
    while disk.held:
        disk.release(0)
    assert disk.files == {disk.name(0), disk.name(1)}, "all but the current segments are gone"
    assert disk.live.num_bytes == 0


@given(st.integers(1, 5), st.randoms())
def test_late_releases_remove_each_segment_once(count: int, random: Any) -> None:
    live = LiveRefs()
    refs = [
        PayloadRef(f"w0.0-{n:04d}.seg", offset, 10)
        for n in range(count)
        for offset in (0, 64)
    ]
    for ref in refs:
        live.hold(ref)
    random.shuffle(refs)
    removed = [ref.segment for ref in refs if live.release(ref)]
    assert sorted(removed) == [f"w0.0-{n:04d}.seg" for n in range(count - 1)]


def test_a_restarted_worker_closes_its_earlier_segments() -> None:
    live = LiveRefs()
    old = PayloadRef("w0.0-0003.seg", 0, 10)
    live.hold(old)
    assert not live.release(old)
    assert live.hold(PayloadRef("w0.1-0000.seg", 0, 10))
    assert live.unused(
        ["w0.0-0003.seg", "w0.0-0004.seg", "w0.1-0000.seg", "w1.0-0000.seg", "my.seg"]
    ) == [
        "w0.0-0003.seg",
        "w0.0-0004.seg",
    ]


def test_a_ref_is_held_and_released_once() -> None:
    live = LiveRefs()
    ref = PayloadRef("w0.0-0000.seg", 0, 10)
    live.hold(ref)
    with pytest.raises(PayloadError, match="is already held"):
        live.hold(ref)
    live.release(ref)
    with pytest.raises(PayloadError, match="not held"):
        live.release(ref)
    with pytest.raises(PayloadError, match="not the name of a segment"):
        live.hold(PayloadRef("notes.txt", 0, 10))


@given(
    st.from_regex(r"(?!r[1-9]\d*\.)[aw02.r-]{1,8}", fullmatch=True),
    st.integers(0, 10),
    st.integers(0, 20_000),
    st.integers(0, 3),
)
def test_segment_names_are_parsed_as_they_were_written(
    writer: str, incarnation: int, number: int, generation: int
) -> None:
    name = SegmentName(writer, incarnation, number, generation)
    assert SegmentName.parse(str(name)) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("env.w0.1-0003.seg", SegmentName("env.w0", 1, 3)),
        ("r2.env.w0.0-0000.seg", SegmentName("env.w0", 0, 0, generation=2)),
        ("my.seg", None),
        ("env.w0.1-0003.seg.spare", None),
    ],
)
def test_segment_names_on_disk(text: str, name: SegmentName | None) -> None:
    assert SegmentName.parse(text) == name
    assert name is None or str(name) == text


@pytest.mark.anyio
async def test_a_folder_that_cannot_be_listed_or_changed_keeps_its_segments_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    async def say(text: str) -> None:
        said.append(text)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    keeper = SegmentKeeper(SegmentReader(tmp_path), Upkeep(say).attempt)
    names = [f"w0.0-000{number}.seg" for number in range(4)]
    for name, refused in zip(names, ("", "scandir", "unlink", ""), strict=True):
        (tmp_path / name).write_bytes(b"")
        ref = PayloadRef(name, 0, 10)
        with monkeypatch.context() as patch:
            if refused:
                patch.setattr(os, refused, refuse)
            if refused == "unlink":
                patch.setattr(os, "rename", refuse)
            await keeper.hold(ref)
            await keeper.release([ref])
    assert SegmentReader(tmp_path).segments() == names[-1:]
    assert any(text.startswith("Removing payload that was trained failed") for text in said)
