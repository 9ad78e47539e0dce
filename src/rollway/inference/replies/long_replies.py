"""Parses long JSON in another process, through a file in memory that both processes share.

A reply of 60,000 tokens is 6 MB of JSON. Parsing it takes 14 ms, during which the GIL is held.
"""

import asyncio
import os
import tempfile
from typing import IO

import numpy as np

from ...errors import EngineError, LaneError, LaneRaised, ReplyAborted
from ...loop.lanes.lanes import ProcessLane
from ...loop.lanes.threads import thread_to_the_end
from ..engines.dialect import Dialect
from ..engines.sglang import Sglang
from ..engines.vllm import Vllm
from .columns import ReplyColumns

DEADLINE_S = 60.0
_DIALECTS: dict[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang(None)}


class LongReplies:
    """Parses long replies in a process lane, one at a time. The file holds one reply. It has a path that
    the lane can open, and vanishes with this process."""

    def __init__(self, lane: ProcessLane) -> None:
        self._lane = lane
        self._lock = asyncio.Lock()
        self._file: IO[bytes]
        if hasattr(os, "memfd_create"):
            number = os.memfd_create("rollway-reply")
            self._file = os.fdopen(number, "r+b", buffering=0)
            self._path = f"/proc/{os.getpid()}/fd/{number}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="rollway-reply-")  # noqa: SIM115
            self._path = self._file.name

    async def parse_columns(self, dialect: str, rest: bytearray) -> ReplyColumns:
        """Do the same as `parse_columns` of the dialect with this name."""
        async with self._lock:
            file = self._file.fileno()
            await thread_to_the_end(_write, file, rest)
            try:
                num_columns, num_tokens, finish_reason = await self._lane.call(
                    replace_by_columns, dialect, self._path, len(rest), deadline_s=DEADLINE_S
                )
            except LaneRaised as error:
                was_aborted = error.kind == ReplyAborted.__name__
                kind = ReplyAborted if was_aborted else EngineError
                raise kind(error.text) from None
            except LaneError as error:
                raise EngineError(
                    f"the engine's long reply could not be parsed: {error}"
                ) from None
            size = 4 * num_columns * num_tokens
            raw = await thread_to_the_end(os.pread, file, size, 0)
        token_ids, logprobs, *more = np.frombuffer(raw, np.int32).reshape(
            num_columns, num_tokens
        )
        versions = more[0] if more else None
        return ReplyColumns(token_ids, logprobs.view(np.float32), versions, finish_reason)

    def __enter__(self) -> "LongReplies":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _write(file: int, body: bytearray) -> None:
    view = memoryview(body)
    written = 0
    while written < len(view):
        written += os.pwrite(file, view[written:], written)


def replace_by_columns(dialect: str, path: str, length: int) -> tuple[int, int, str]:
    """Replace the JSON in the file by its columns, of which each number has 4 bytes. Return how many
    columns and tokens there are, and why the reply ended. Runs in the lane."""
    with open(path, "r+b", buffering=0) as file:
        drawn = _DIALECTS[dialect].parse_columns(file.read(length))
        columns = [drawn.token_ids.tobytes(), drawn.logprobs.tobytes()]
        if drawn.versions is not None:
            columns.append(drawn.versions.tobytes())
        _write(file.fileno(), bytearray().join(columns))
    return len(columns), len(drawn.token_ids), drawn.finish_reason
