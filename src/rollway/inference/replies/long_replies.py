"""Parses long JSON in another process, which shares a file in memory with this one.

A reply of 60,000 tokens is 6 MB of JSON and takes a parser 14 ms, with the GIL held all the while.
"""

import asyncio
import os
import tempfile
from types import TracebackType

import numpy as np

from ...errors import EngineError, LaneError, LaneRaised
from ...loop.lanes.lanes import ProcessLane, thread_to_the_end
from ..engines.dialect import Dialect
from ..engines.sglang import Sglang
from ..engines.vllm import Vllm
from .columns import ReplyColumns

DEADLINE_S = 60.0
_DIALECTS: dict[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang(None)}


class LongReplies:
    """One shared file, one reply in it at a time."""

    def __init__(self, lane: ProcessLane) -> None:
        self._lane = lane
        self._file = _SharedFile()
        self._turn = asyncio.Lock()

    async def columns(self, dialect: str, rest: bytearray) -> ReplyColumns:
        """The same as the dialect's own `columns`."""
        async with self._turn:
            await thread_to_the_end(_write, self._file.number, rest)
            try:
                num_tokens, has_versions, finish_reason = await self._lane.call(
                    columns_in_file, dialect, self._file.path, len(rest), deadline_s=DEADLINE_S
                )
            except LaneRaised as error:
                raise EngineError(str(error).partition(": ")[2]) from None
            except LaneError as error:
                raise EngineError(f"a long reply could not be parsed: {error}") from None
            size = (12 if has_versions else 8) * num_tokens
            raw = await thread_to_the_end(os.pread, self._file.number, size, 0)
        return ReplyColumns(
            np.frombuffer(raw, np.int32, num_tokens),
            np.frombuffer(raw, np.float32, num_tokens, 4 * num_tokens),
            np.frombuffer(raw, np.int32, num_tokens, 8 * num_tokens) if has_versions else None,
            finish_reason,
        )

    def __enter__(self) -> "LongReplies":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class _SharedFile:
    """Memory with a path: anonymous where the system can, so that nothing stays behind."""

    def __init__(self) -> None:
        self._named = None
        if hasattr(os, "memfd_create"):
            self.number = os.memfd_create("rollway-reply")
            self.path = f"/proc/{os.getpid()}/fd/{self.number}"
        else:
            self._named = tempfile.NamedTemporaryFile(prefix="rollway-reply-")  # noqa: SIM115
            self.number, self.path = self._named.fileno(), self._named.name

    def close(self) -> None:
        if self._named is not None:
            self._named.close()
        else:
            os.close(self.number)


def _write(file: int, body: bytearray) -> None:
    view = memoryview(body)
    written = 0
    while written < len(view):
        written += os.pwrite(file, view[written:], written)


def columns_in_file(dialect: str, path: str, length: int) -> tuple[int, bool, str]:
    """Runs in the lane: the file's JSON is replaced by its columns, end to end."""
    with open(path, "r+b", buffering=0) as file:
        found = _DIALECTS[dialect].columns(file.read(length))
        versions = np.zeros(0, np.int32) if found.versions is None else found.versions
        joined = found.token_ids.tobytes() + found.logprobs.tobytes() + versions.tobytes()
        _write(file.fileno(), bytearray(joined))
    return len(found.token_ids), found.versions is not None, found.finish_reason
