"""Opens refs: maps a segment once and gives views of its columns."""

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import PayloadError
from ..records.payload import PayloadRef
from .blob import parse


class SegmentReader:
    """Maps segments of one payload directory. Views stay valid as long as somebody holds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def open(self, ref: PayloadRef) -> dict[str, NDArray[np.generic]]:
        """The columns of the blob at `ref`, without a copy."""
        end = ref.offset + ref.length
        mapped = self._maps.get(ref.segment)
        if mapped is None or len(mapped) < end:
            mapped = self._maps[ref.segment] = self._map(ref, end)
        return parse(memoryview(mapped)[ref.offset : end])

    def forget(self) -> None:
        """Let go of all maps, so that removed segments give back their space."""
        self._maps.clear()

    def _map(self, ref: PayloadRef, end: int) -> mmap.mmap:
        path = self._folder / ref.segment
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise PayloadError(f"cannot open segment {path}: {error}") from None
        if len(mapped) < end:
            raise PayloadError(f"segment {path} has {len(mapped)} bytes, the ref ends at {end}")
        return mapped
