"""The layout of a blob: one rollout's columns as a self-contained safetensors file.

A blob starts at a multiple of 64 bytes, and so does its data. Wider dtypes come first, so that every
tensor is aligned to its own item size without holes (safetensors allows none). The header opens with
the checksum of the data and the mark of the segment it is written to, always the same eight hex digits
wide, so that its length is known before they are:

    8 bytes  length of the header
    header   {"__metadata__":{"crc32c":"1a2b3c4d","segment":"5e6f7a8b"},"row0.token_ids":{…},…}, spaces
    data     the columns, one after the other

Segments take over the files of released ones, so a blob must tell whether it is of the segment in which
it is found, or of one that lay there before.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from crc32c import crc32c
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import UNREADABLE, PayloadError

ALIGN = 64
METADATA = "__metadata__"
OPENING = b'{"__metadata__":{"crc32c":"'
"""How every header begins; the eight digits follow."""
_BETWEEN = b'","segment":"'
_CRC_AT, _CRC_END = 8 + len(OPENING), 8 + len(OPENING) + 8
_MARK_AT, _MARK_END = _CRC_END + len(_BETWEEN), _CRC_END + len(_BETWEEN) + 8
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("uint8"), "U16": np.dtype("uint16"), "I32": np.dtype("int32"),
    "I64": np.dtype("int64"), "F32": np.dtype("float32"),
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Column = Sequence[NDArray[np.generic]]
Columns = dict[str, NDArray[np.generic]]
Buffer = bytes | memoryview


class ColumnEntry(Struct, frozen=True):
    """What a header says of one column."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Metadata(Struct):
    crc32c: str = ""
    segment: str = ""


_header: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry: msgspec.json.Decoder[ColumnEntry] = msgspec.json.Decoder(ColumnEntry)
_metadata: msgspec.json.Decoder[_Metadata] = msgspec.json.Decoder(_Metadata)


class Blob(Struct, frozen=True):
    """What to write, in order, without joining: a header that waits for its checksum, and the
    columns' own buffers."""

    length: int
    head: bytes
    data: tuple[memoryview, ...]


class BlobHeader(Struct, frozen=True):
    """A parsed header: where the data begins and ends in the blob, its checksum, its columns."""

    start: int
    end: int
    crc32c: str
    entries: dict[str, ColumnEntry]


def pad(length: int) -> int:
    """Bytes that bring `length` to the next multiple of 64."""
    return -length % ALIGN


def build(columns: Mapping[str, Column]) -> Blob:
    """Lay out columns, each given as chunks of one dtype and trailing shape. Copies no column."""
    entries: dict[str, object] = {METADATA: _Metadata("0" * 8, "0" * 8)}
    data: list[memoryview] = []
    offset = 0
    for name, chunks in sorted(columns.items(), key=lambda item: -item[1][0].dtype.itemsize):
        start, num_items = offset, 0
        for chunk in chunks:
            num_items += len(chunk)
            if chunk.nbytes:
                offset += chunk.nbytes
                whole = chunk if chunk.flags.c_contiguous else np.ascontiguousarray(chunk)
                data.append(whole.data)
        first = chunks[0]
        shape = (num_items, *first.shape[1:])
        entries[name] = ColumnEntry(_NAMES[first.dtype], shape, (start, offset))
    header = msgspec.json.encode(entries)
    header += b" " * pad(8 + len(header))
    head = len(header).to_bytes(8, "little") + header
    return Blob(len(head) + offset, head, tuple(data))


def mark_of(segment: str) -> bytes:
    """What blobs of a segment carry instead of its name."""
    return _digits(crc32c(segment.encode()))


def seal(blob: Blob, segment: str = "") -> list[Buffer]:
    """The blob's bytes in order, its checksum in place. For the thread lane: it reads all data."""
    checksum = 0
    for chunk in blob.data:
        checksum = crc32c(chunk, checksum)
    head = blob.head[:_CRC_AT] + _digits(checksum) + _BETWEEN + mark_of(segment) + blob.head[_MARK_END:]
    return [head, *blob.data]


def moved(blob: memoryview, segment: str) -> list[Buffer]:
    """The bytes of a sealed blob in order, as those of another segment."""
    return [blob[:_MARK_AT], mark_of(segment), blob[_MARK_END:]]


def join(blob: Blob) -> memoryview:
    """The blob's bytes as one buffer, for a wire. For the thread lane: it copies all data."""
    parts = seal(blob)
    whole = np.empty(blob.length, np.uint8)
    at = 0
    for part in parts:
        raw = np.frombuffer(part, np.uint8)
        whole[at : at + raw.size] = raw
        at += raw.size
    return whole.data


def read_header(blob: memoryview) -> BlobHeader:
    """The header of the blob that `blob` begins with; it may be followed by anything."""
    size = int.from_bytes(blob[:8], "little")
    if not 0 < size <= len(blob) - 8:
        raise PayloadError(f"header of {size} bytes in a blob of {len(blob)}")
    try:
        fields = _header.decode(blob[8 : 8 + size])
        metadata = _metadata.decode(fields.pop(METADATA, msgspec.Raw(b"{}")))
        entries = {name: _entry.decode(raw) for name, raw in fields.items()}
    except UNREADABLE as error:
        raise PayloadError(f"malformed blob header: {error}") from None
    end = max(0, *(entry.data_offsets[1] for entry in entries.values()), 0)
    if 8 + size + end > len(blob):
        raise PayloadError(f"a blob of {8 + size + end} bytes in {len(blob)}")
    return BlobHeader(8 + size, 8 + size + end, metadata.crc32c, entries)


def parse(blob: memoryview) -> Columns:
    """The columns of a blob, as views of its bytes."""
    header = read_header(blob)
    data = blob[header.start : header.end]
    return {name: _view(name, entry, data) for name, entry in header.entries.items()}


def check_mark(blob: memoryview, segment: str) -> None:
    """Raise unless the blob was written to this segment."""
    if bytes(blob[_MARK_AT:_MARK_END]) != mark_of(segment):
        raise PayloadError("it is of another segment, which this file held before")


def check(blob: memoryview) -> None:
    """Raise unless the data is what was sealed. Reads all of it, decodes nothing of it."""
    start = 8 + int.from_bytes(blob[:8], "little")
    said = bytes(blob[_CRC_AT:_CRC_END])
    if bytes(blob[8:_CRC_AT]) != OPENING or not _MARK_END < start <= len(blob):
        raise PayloadError("this is no blob, or one without a checksum")
    found = _digits(crc32c(blob[start:]))
    if found != said:
        said_text = said.decode(errors="replace")
        raise PayloadError(f"its data has checksum {found.decode()}, its header says {said_text}")


def _digits(checksum: int) -> bytes:
    return b"%08x" % checksum


def _view(name: str, entry: ColumnEntry, data: memoryview) -> NDArray[np.generic]:
    start, end = entry.data_offsets
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise PayloadError(f"column '{name}' has unknown dtype {entry.dtype}")
    fits = all(n >= 0 for n in entry.shape) and math.prod(entry.shape) * dtype.itemsize == end - start
    if not (0 <= start <= end <= len(data) and fits):
        raise PayloadError(f"column '{name}' lies outside its blob, or its shape does not fit")
    return np.frombuffer(data[start:end], dtype).reshape(entry.shape)


def row_columns(rows: Iterable[Mapping[str, Column]]) -> dict[str, Column]:
    """Names of several rows' columns in one blob: `row0.token_ids`, `row1.token_ids`, …"""
    return {
        f"row{index}.{name}": chunks
        for index, columns in enumerate(rows)
        for name, chunks in columns.items()
    }
