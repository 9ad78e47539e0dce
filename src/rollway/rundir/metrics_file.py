"""`metrics.jsonl`, `evals.jsonl`: one line a step, the last of which a crash may have torn. Blocks."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from ..errors import UNREADABLE


class _Head(Struct):
    step: int


class MetricsFile:
    """Appended to while a run lasts; whoever reads it sees whole lines only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: bytes) -> None:
        """In one write, so that no reader sees half of it unless this process dies meanwhile."""
        left = memoryview(line + b"\n")
        with self.path.open("ab", buffering=0) as file:
            while left:
                left = left[file.write(left) :]

    def lines(self, start: int = 0) -> Iterator[tuple[int, int, bytes]]:
        """Step, end and text of every whole line from byte `start` on."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(start)
            for line in file:
                start += len(line)
                step = _step_of(line)
                if step is not None:
                    yield step, start, line

    def last_step(self) -> int:
        """The newest that was reported; -1 before the first."""
        return max((step for step, _, _ in self.lines()), default=-1)

    def kept_until(self, step: int) -> bytes:
        """What is to stay of it: whole lines of steps up to `step`."""
        return b"".join(line for number, _, line in self.lines() if number <= step)


def _step_of(line: bytes) -> int | None:
    """None for a line that is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        return msgspec.json.decode(line, type=_Head).step
    except UNREADABLE:
        return None
