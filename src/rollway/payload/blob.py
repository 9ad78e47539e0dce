"""The layout of a blob: one rollout's columns as a self-contained safetensors file.

A blob starts at a multiple of 64 bytes, and so does its data. Wider dtypes come first, so that every
tensor is aligned to its own item size without holes (safetensors allows none).
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import PayloadError

ALIGN = 64
_NAMES = {"uint8": "U8", "uint16": "U16", "int32": "I32", "int64": "I64", "float32": "F32"}
_DTYPES = {name: np.dtype(dtype) for dtype, name in _NAMES.items()}

Column = Sequence[NDArray[np.generic]]


class _Entry(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Blob(Struct, frozen=True):
    """What to write, in order, without joining: a header and the columns' own buffers."""

    length: int
    parts: tuple[memoryview, ...]


def pad(length: int) -> int:
    """Bytes that bring `length` to the next multiple of 64."""
    return -length % ALIGN


def build(columns: Mapping[str, Column]) -> Blob:
    """Lay out columns, each given as chunks of one dtype and trailing shape. Copies no column."""
    entries: dict[str, _Entry] = {}
    parts: list[memoryview] = []
    offset = 0
    for name, chunks in sorted(columns.items(), key=lambda item: -item[1][0].dtype.itemsize):
        arrays = [np.ascontiguousarray(chunk) for chunk in chunks]
        length = sum(array.nbytes for array in arrays)
        shape = (sum(len(array) for array in arrays), *arrays[0].shape[1:])
        entries[name] = _Entry(_NAMES[arrays[0].dtype.name], shape, (offset, offset + length))
        offset += length
        parts += [array.data.cast("B") for array in arrays if array.nbytes]
    header = msgspec.json.encode(entries)
    header += b" " * pad(8 + len(header))
    head = len(header).to_bytes(8, "little") + header
    return Blob(len(head) + offset, (memoryview(head), *parts))


def parse(blob: memoryview) -> dict[str, NDArray[np.generic]]:
    """The columns of a blob, as views of its bytes."""
    try:
        size = int.from_bytes(blob[:8], "little")
        if not 0 < size <= len(blob) - 8:
            raise PayloadError(f"header of {size} bytes in a blob of {len(blob)}")
        entries = msgspec.json.decode(blob[8 : 8 + size], type=dict[str, _Entry])
        data = blob[8 + size :]
        return {name: _view(name, entry, data) for name, entry in entries.items()}
    except msgspec.MsgspecError as error:
        raise PayloadError(f"malformed blob header: {error}") from None


def _view(name: str, entry: _Entry, data: memoryview) -> NDArray[np.generic]:
    start, end = entry.data_offsets
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise PayloadError(f"column '{name}' has unknown dtype {entry.dtype}")
    if not 0 <= start <= end <= len(data) or math.prod(entry.shape) * dtype.itemsize != end - start:
        raise PayloadError(f"column '{name}' lies outside its blob, or its shape does not fit")
    return np.frombuffer(data[start:end], dtype).reshape(entry.shape)


def row_columns(rows: Iterable[Mapping[str, Column]]) -> dict[str, Column]:
    """Names of several rows' columns in one blob: `row0.token_ids`, `row1.token_ids`, …"""
    return {
        f"row{index}.{name}": chunks
        for index, columns in enumerate(rows)
        for name, chunks in columns.items()
    }
