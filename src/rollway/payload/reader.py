"""Opens refs: maps a segment once and gives views of its columns."""

import mmap
import os
from pathlib import Path

import numpy as np

from ..errors import PayloadError
from ..records.batch import BatchRow
from ..records.payload import PayloadRef
from .blob import Columns, check, check_mark, parse
from .lock import share
from .reuse import retire

_AGAIN = "'rollway train … --resume' makes what was not trained anew"


class SegmentReader:
    """Maps segments of one payload directory. Views stay valid as long as somebody holds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def open(self, ref: PayloadRef) -> Columns:
        """The columns of the blob at `ref`, without a copy and without reading them."""
        blob = self._bytes(ref)
        try:
            columns = parse(blob)
            check_mark(blob, ref.segment)
        except PayloadError as error:
            raise self._damaged(ref, error) from None
        return columns

    def row(self, row: BatchRow) -> Columns:
        """The columns of one row of a batch: `token_ids`, `loss_mask`, `logprobs`, …"""
        prefix = f"row{row.row}."
        columns = {
            name.removeprefix(prefix): column
            for name, column in self.open(row.ref).items()
            if name.startswith(prefix)
        }
        if len(columns.get("token_ids", ())) != row.num_tokens:
            raise PayloadError(f"rollout {row.rollout_id}: row {row.row} is not what its manifest says")
        return columns

    def copy(self, ref: PayloadRef) -> memoryview:
        """The bytes of a blob as a buffer of their own, for a wire. For the thread lane."""
        whole = np.empty(ref.length, np.uint8)
        whole[:] = np.frombuffer(self._bytes(ref), np.uint8)
        return whole.data

    def verify(self, ref: PayloadRef) -> None:
        """Read the whole blob; raises unless it is, byte for byte, what was written."""
        blob = self._bytes(ref)
        try:
            check(blob)
            check_mark(blob, ref.segment)
        except PayloadError as error:
            raise self._damaged(ref, error) from None

    def forget(self) -> None:
        """Let go of all maps, so that files of removed segments can be used again."""
        self._maps.clear()

    def segments(self) -> list[str]:
        """The names of all segments there are."""
        return [path.name for path in self._folder.glob("*.seg")]

    def remove(self, segment: str) -> None:
        """Take a segment away; one that is gone already is as good."""
        self._maps.pop(segment, None)
        retire(self._folder / segment)

    def _bytes(self, ref: PayloadRef) -> memoryview:
        end = ref.offset + ref.length
        mapped = self._maps.get(ref.segment)
        if mapped is None or len(mapped) < end:
            mapped = self._maps[ref.segment] = self._map(ref, end)
        return memoryview(mapped)[ref.offset : end]

    def _map(self, ref: PayloadRef, end: int) -> mmap.mmap:
        path = self._folder / ref.segment
        try:
            with path.open("rb") as file:
                share(file.fileno(), path)
                size = os.fstat(file.fileno()).st_size
                if size < end:
                    raise PayloadError(
                        f"segment {path} has {size} bytes, the ref at {ref.offset} ends at {end}: it "
                        f"was cut after that was written; {_AGAIN}"
                    )
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise PayloadError(
                f"no segment {path} for the ref at {ref.offset}: it was released, or removed by hand; "
                f"{_AGAIN}"
            ) from None
        except OSError as error:
            raise PayloadError(f"cannot open segment {path}: {error}") from None

    def _damaged(self, ref: PayloadRef, error: PayloadError) -> PayloadError:
        path = self._folder / ref.segment
        return PayloadError(
            f"the blob at offset {ref.offset} of {path} is damaged: {error}; 'rollway payload show "
            f"--verify {path}' says what is whole, {_AGAIN}"
        )
