"""Opens refs: maps each segment once and returns views of its columns."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..errors import PayloadError
from ..records.batch import BatchRow
from ..records.payload import PayloadRef
from .blob import Columns, check_data, check_mark, parse
from .lock import map_shared
from .reuse import make_spare

T = TypeVar("T")

_RESUME = "'rollway train … --resume' runs the rollouts again that were not trained"


class SegmentReader:
    """Maps segments of one payload directory. A view stays valid as long as it is referenced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, memoryview] = {}

    def open(self, ref: PayloadRef) -> Columns:
        """Return the columns of the blob at `ref`, without copying or reading them."""
        return self._inspect(ref, parse)

    def row(self, row: BatchRow) -> Columns:
        """Return the columns of one row of a batch: `token_ids`, `loss_mask`, `logprobs` and so on."""
        prefix = f"row{row.row}."
        columns = {
            name.removeprefix(prefix): column
            for name, column in self.open(row.ref).items()
            if name.startswith(prefix)
        }
        if len(columns.get("token_ids", ())) != row.num_tokens:
            raise PayloadError(
                f"rollout {row.rollout_id}: row {row.row} does not have the {row.num_tokens} tokens "
                "that its manifest says"
            )
        return columns

    def copy(self, ref: PayloadRef) -> memoryview:
        """Return a copy of a blob's bytes, for a wire. For the thread lane."""
        copied = np.empty(ref.length, np.uint8)
        copied[:] = np.frombuffer(self._bytes(ref), np.uint8)
        return copied.data

    def verify(self, ref: PayloadRef) -> None:
        """Read the whole blob. Raise PayloadError unless it is, byte for byte, what was written."""
        self._inspect(ref, check_data)

    def segments(self) -> list[str]:
        return [path.name for path in self._folder.glob("*.seg")]

    def remove(self, segment: str) -> None:
        """Remove a segment. It may be gone already."""
        self._maps.pop(segment, None)
        make_spare(self._folder / segment)

    def _inspect(self, ref: PayloadRef, inspect: Callable[[memoryview], T]) -> T:
        """Return what `inspect` returns for a blob, which must have the mark of its segment."""
        blob = self._bytes(ref)
        try:
            result = inspect(blob)
            check_mark(blob, ref.segment)
        except PayloadError as error:
            path = self._folder / ref.segment
            raise PayloadError(
                f"the blob at offset {ref.offset} of {path} is damaged: {error}; 'rollway payload show "
                f"--verify {path}' lists the blobs that are whole; {_RESUME}"
            ) from None
        return result

    def _bytes(self, ref: PayloadRef) -> memoryview:
        end = ref.offset + ref.length
        mapped = self._maps.get(ref.segment)
        if mapped is None or len(mapped) < end:
            mapped = self._maps[ref.segment] = self._map(ref, end)
        return mapped[ref.offset : end]

    def _map(self, ref: PayloadRef, end: int) -> memoryview:
        path = self._folder / ref.segment
        try:
            mapped = map_shared(path)
        except FileNotFoundError:
            raise PayloadError(
                f"segment {path} of the ref at {ref.offset} does not exist: it was released, or removed "
                f"by hand; {_RESUME}"
            ) from None
        except OSError as error:
            raise PayloadError(f"cannot open segment {path}: {error}") from None
        if len(mapped) < end:
            raise PayloadError(
                f"segment {path} has {len(mapped)} bytes, but the ref at {ref.offset} ends at {end}: "
                f"the file was cut after the ref was written; {_RESUME}"
            )
        return mapped
