"""Files with one JSON line per step: `metrics.jsonl` and `evals.jsonl`. Calls block.

A crash may have torn the last line. Readers pass over torn lines.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from ..errors import UNREADABLE


class _LineHead(Struct):
    step: int


def append_whole(path: Path, data: bytes) -> None:
    """Append to a file. If not all of it can be written, as on a full disk, take back what was."""
    unwritten = memoryview(data)
    with path.open("ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
        except OSError:
            file.truncate(start)
            raise


class MetricsFile:
    """A metrics file that is appended to while a run lasts, and read at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: bytes) -> None:
        """Append a line in one write: a reader sees half of it only if this process dies meanwhile."""
        append_whole(self.path, line + b"\n")

    def lines(self, start: int = 0) -> Iterator[tuple[int, int, bytes]]:
        """Yield the step, the end and the text of every complete line from byte `start` on."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(start)
            for line in file:
                start += len(line)
                step = _read_step(line)
                if step is not None:
                    yield step, start, line

    def last_step(self) -> int:
        """Return the newest step in the file; -1 before the first."""
        return max((step for step, _, _ in self.lines()), default=-1)

    def lines_until(self, last: int) -> bytes:
        """Return the complete lines of all steps up to `last`."""
        return b"".join(line for step, _, line in self.lines() if step <= last)


def _read_step(line: bytes) -> int | None:
    """Return the step of a line; None if the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        return msgspec.json.decode(line, type=_LineHead).step
    except UNREADABLE:
        return None
