"""The layout of a blob: one rollout's columns as a self-contained safetensors file.

A blob starts at a multiple of 64 bytes, and so does its data. Wider dtypes come first, so that every
tensor is aligned to its own item size without holes (safetensors allows none). The header opens with
the checksum of the data and the mark of the segment it is written to. Both always have eight hex
digits, so the length of the header is known before their values are:

    8 bytes  length of the header
    header   {"__metadata__":{"crc32c":"1a2b3c4d","segment":"5e6f7a8b"},"row0.token_ids":{…},…}, spaces
    data     the columns, one after the other

New segments reuse the files of released ones. The mark tells whether a blob belongs to the segment in
which it is found, or to one that used the file before.
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
from ..records.turn import SpooledRoutes

ALIGN = 64
WIDEST = 8
"""Bytes of the widest dtype."""
METADATA = "__metadata__"
OPENING = b'{"__metadata__":{"crc32c":"'
"""How every header begins; the eight digits follow."""
_BETWEEN = b'","segment":"'
_CRC_AT, _CRC_END = 8 + len(OPENING), 8 + len(OPENING) + 8
_MARK_AT, _MARK_END = _CRC_END + len(_BETWEEN), _CRC_END + len(_BETWEEN) + 8
_KINDS = {"U8": "uint8", "U16": "uint16", "I32": "int32", "I64": "int64", "F32": "float32"}
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in _KINDS.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

TEXT = "transcript"
"""The column of JSON. Spaces behind it change nothing, and align the columns that follow."""

Column = Sequence[NDArray[np.generic] | SpooledRoutes]
"""The chunks of one column."""
Columns = dict[str, NDArray[np.generic]]
Buffer = bytes | memoryview


class ColumnEntry(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Metadata(Struct):
    crc32c: str = ""
    segment: str = ""


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(ColumnEntry)
_metadata = msgspec.json.Decoder(_Metadata)


class Blob(Struct, frozen=True):
    """The buffers to write, in order: a header that still lacks its checksum, then the columns. Between
    the two, `num_behind` bytes with the checksum `behind` may be in the file already."""

    length: int
    head: bytes
    data: tuple[memoryview, ...]
    num_behind: int = 0
    behind: int = 0


class BlobHeader(Struct, frozen=True):
    """A parsed header: where the data begins and ends in the blob, its checksum, its columns."""

    start: int
    end: int
    crc32c: str
    entries: dict[str, ColumnEntry]


def pad(length: int) -> int:
    """Return how many bytes bring `length` to the next multiple of 64."""
    return -length % ALIGN


def build(columns: Mapping[str, Column]) -> Blob:
    """Lay out columns, each given as chunks of one dtype and trailing shape. Copies no column."""
    header, data = _lay_out(sorted(columns.items(), key=_narrowness))
    header += b" " * pad(8 + len(header))
    head = len(header).to_bytes(8, "little") + header
    return Blob(len(head) + sum(chunk.nbytes for chunk in data), head, tuple(data))


def build_behind(
    columns: Mapping[str, Column], head_bytes: int, num_behind: int, checksum: int
) -> Blob | None:
    """Lay out columns behind chunks that are in a file already: `num_behind` bytes with this checksum,
    after room for the header. Return None if a layout needs them in another order, or more room."""
    spooled = {name: chunks for name, chunks in columns.items() if _is_spooled(chunks)}
    before = [chunk for chunks in (*spooled.values(), columns[TEXT]) for chunk in chunks]
    spaces = np.full(-sum(chunk.nbytes for chunk in before) % WIDEST, ord(" "), np.uint8)
    rest = columns.keys() - spooled.keys() - {TEXT}
    ordered: list[tuple[str, Column]] = [
        *spooled.items(),
        (TEXT, (*columns[TEXT], spaces)),
        *sorted(((name, columns[name]) for name in sorted(rest)), key=_narrowness),
    ]
    header, data = _lay_out(ordered)
    num_spaces = head_bytes - 8 - len(header)
    if num_spaces < 0 or not _begin_with(before, num_behind):
        return None
    head = (head_bytes - 8).to_bytes(8, "little") + header + b" " * num_spaces
    num_bytes = num_behind + sum(chunk.nbytes for chunk in data)
    return Blob(head_bytes + num_bytes, head, tuple(data), num_behind, checksum)


def _narrowness(column: tuple[str, Column]) -> int:
    return -column[1][0].dtype.itemsize


def _is_spooled(chunks: Column) -> bool:
    return any(isinstance(chunk, SpooledRoutes) for chunk in chunks)


def _begin_with(
    chunks: Sequence[NDArray[np.generic] | SpooledRoutes], num_behind: int
) -> bool:
    """Return whether chunks begin with all that is in the file, and the rest is in memory."""
    offset = 0
    for chunk in chunks:
        if isinstance(chunk, SpooledRoutes) != (offset < num_behind) and chunk.nbytes:
            return False
        if isinstance(chunk, SpooledRoutes) and chunk.start != offset:
            return False
        offset += chunk.nbytes
    return True


def _lay_out(columns: Iterable[tuple[str, Column]]) -> tuple[bytes, list[memoryview]]:
    """Return the JSON of the header for columns in this order, and the chunks that are in memory."""
    entries: dict[str, object] = {METADATA: _Metadata("0" * 8, "0" * 8)}
    data: list[memoryview] = []
    offset = 0
    for name, chunks in columns:
        start, num_items = offset, 0
        for chunk in chunks:
            num_items += len(chunk)
            offset += chunk.nbytes
            if chunk.nbytes and not isinstance(chunk, SpooledRoutes):
                data.append(np.ascontiguousarray(chunk).data)
        _, *item = chunks[0].shape
        entries[name] = ColumnEntry(
            _NAMES[chunks[0].dtype], (num_items, *item), (start, offset)
        )
    return msgspec.json.encode(entries), data


def mark_of(segment: str) -> bytes:
    """Return the eight digits that blobs carry instead of the name of their segment."""
    return _digits(crc32c(segment.encode()))


def seal(blob: Blob, segment: str = "") -> list[Buffer]:
    """Return the blob's bytes in order, with its checksum. For the thread lane: it reads all data."""
    checksum = blob.behind
    for chunk in blob.data:
        checksum = crc32c(chunk, checksum)
    digits = _digits(checksum) + _BETWEEN + mark_of(segment)
    return [blob.head[:_CRC_AT] + digits + blob.head[_MARK_END:], *blob.data]


def relabel(blob: memoryview, segment: str) -> list[Buffer]:
    """Return the bytes of a sealed blob in order, with the mark of another segment."""
    return [blob[:_MARK_AT], mark_of(segment), blob[_MARK_END:]]


def join(blob: Blob) -> memoryview:
    """Return the blob's bytes as one buffer, for a wire. For the thread lane: it copies all data."""
    joined = np.empty(blob.length, np.uint8)
    offset = 0
    for part in seal(blob):
        raw = np.frombuffer(part, np.uint8)
        joined[offset : offset + raw.size] = raw
        offset += raw.size
    return joined.data


def read_header(blob: memoryview) -> BlobHeader:
    """Parse the header at the start of `blob`. Other bytes may follow the blob."""
    size = int.from_bytes(blob[:8], "little")
    if not 0 < size <= len(blob) - 8:
        raise PayloadError(f"its header claims {size} bytes, but {len(blob)} bytes are there")
    try:
        fields = _header.decode(blob[8 : 8 + size])
        metadata = _metadata.decode(fields.pop(METADATA, msgspec.Raw(b"{}")))
        entries = {name: _entry.decode(raw) for name, raw in fields.items()}
    except UNREADABLE as error:
        raise PayloadError(f"its header cannot be read: {error}") from None
    start = 8 + size
    ends = (entry.data_offsets[1] for entry in entries.values())
    end = start + max(ends, default=0)
    if end > len(blob):
        raise PayloadError(f"its header claims {end} bytes, but {len(blob)} bytes are there")
    return BlobHeader(start, end, metadata.crc32c, entries)


def parse(blob: memoryview) -> Columns:
    """Return the columns of a blob, as views of its bytes."""
    header = read_header(blob)
    data = blob[header.start : header.end]
    return {name: _view(name, entry, data) for name, entry in header.entries.items()}


def check_mark(blob: memoryview, segment: str) -> None:
    """Raise PayloadError unless the blob was written to this segment."""
    if bytes(blob[_MARK_AT:_MARK_END]) != mark_of(segment):
        raise PayloadError("it belongs to another segment, whose file was reused")


def check_data(blob: memoryview) -> None:
    """Raise PayloadError unless the data is what was sealed. Reads all data and decodes none of it."""
    start = 8 + int.from_bytes(blob[:8], "little")
    expected = bytes(blob[_CRC_AT:_CRC_END])
    if bytes(blob[8:_CRC_AT]) != OPENING or not _MARK_END < start <= len(blob):
        raise PayloadError("these bytes are not a blob with a checksum")
    found = _digits(crc32c(blob[start:]))
    if found != expected:
        in_header = expected.decode(errors="replace")
        raise PayloadError(
            f"its data has checksum {found.decode()}, its header says {in_header}"
        )


def _digits(checksum: int) -> bytes:
    return b"%08x" % checksum


def _view(name: str, entry: ColumnEntry, data: memoryview) -> NDArray[np.generic]:
    start, end = entry.data_offsets
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise PayloadError(f"column '{name}' has unknown dtype {entry.dtype}")
    num_bytes = math.prod(entry.shape) * dtype.itemsize
    fits = all(size >= 0 for size in entry.shape) and num_bytes == end - start
    if not (0 <= start <= end <= len(data) and fits):
        raise PayloadError(
            f"column '{name}' lies outside its blob, or its shape does not fit"
        )
    return np.frombuffer(data[start:end], dtype).reshape(entry.shape)


def row_columns(rows: Iterable[Mapping[str, Column]]) -> dict[str, Column]:
    """Name the columns of several rows in one blob: `row0.token_ids`, `row1.token_ids` and so on."""
    return {
        f"row{index}.{name}": chunks
        for index, columns in enumerate(rows)
        for name, chunks in columns.items()
    }
