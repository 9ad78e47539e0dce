"""Routes as engines send them: base64 of a .npy file, or of bare integers.

Only the positions that are needed are decoded. Decoding releases the GIL, so it may run in a thread.
"""

import io
import math
from pathlib import Path

import msgspec
import numpy as np
import pybase64
from msgspec import Struct

from ...errors import UNREADABLE, EngineError
from ...records.turn import Routes
from .body import BulkString
from .npy import NpyHeader, unreadable

_STEP = 12
"""Decoding starts at a multiple of this: whole groups of base64, and aligned for every integer."""
_INT32 = np.dtype("<i4")


class WantedRoutes(Struct, frozen=True):
    """Which positions a turn needs routes of: from `start` to the last token but one."""

    start: int
    num_prompt: int
    max_tokens: int

    def num_all(self, num_drawn: int) -> int:
        """Positions from the first on."""
        return self.num_prompt + num_drawn - 1


class RouteShape(Struct, frozen=True):
    """What a model's routes look like; needed where the engine does not say."""

    layers: int
    topk: int
    experts: int


class _Text(Struct, frozen=True):
    """What a model's config.json says of its experts, under the names of several families."""

    num_hidden_layers: int = 0
    num_experts_per_tok: int = 0
    num_experts: int = 0
    num_local_experts: int = 0
    n_routed_experts: int = 0


class _Config(_Text, frozen=True):
    text_config: _Text | None = None


def route_shape(folder: str) -> RouteShape | None:
    """The shape of the routes of the model in `folder`; None where its config does not say."""
    try:
        config = msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=_Config)
    except (OSError, *UNREADABLE):
        return None
    text = config.text_config or config
    experts = text.num_experts or text.num_local_experts or text.n_routed_experts
    if not text.num_hidden_layers or not text.num_experts_per_tok:
        return None
    return RouteShape(text.num_hidden_layers, text.num_experts_per_tok, experts)


def unneeded_chars(bulk: BulkString, wanted: WantedRoutes, is_prompt_only: bool) -> int:
    """Characters at the start of a .npy file that hold only positions before `wanted.start`.

    0 unless its length shows that the engine sent all positions though asked for new ones.
    """
    try:
        header = bulk.header
    except EngineError:
        return 0  # said again, and raised, when it is decoded
    longest_delta = wanted.num_prompt - wanted.start + (0 if is_prompt_only else wanted.max_tokens - 1)
    if header.rows <= longest_delta or header.rows < wanted.num_prompt:
        return 0
    return _char_of(header.offset + wanted.start * header.row_bytes)


def _char_of(byte: int) -> int:
    return byte // _STEP * _STEP // 3 * 4


def decode_npy(bulk: BulkString, start: int, num_all: int) -> Routes:
    """Rows from position `start` on, of a file that holds these or all `num_all` positions."""
    first = _first_row(bulk.header, start, num_all)
    return narrow(_decode(bulk, bulk.header, first))


def decode_bare(bulk: BulkString, shape: RouteShape, start: int, num_all: int) -> Routes:
    """The same for bare int32 without a header."""
    row_bytes = 4 * shape.layers * shape.topk
    padding = bytes(bulk.from_char(max(0, bulk.num_chars - 2))).count(b"=")
    num_bytes = bulk.num_chars // 4 * 3 - padding
    rows, odd = divmod(num_bytes, row_bytes)
    if odd:
        raise unreadable(
            f"{num_bytes} bytes are no whole number of tokens of {shape.layers} layers × {shape.topk} "
            "int32, as config.json of 'model.path' says"
        )
    header = NpyHeader(0, rows, shape.layers, shape.topk, _INT32)
    return narrow(_decode(bulk, header, _first_row(header, start, num_all)), shape.experts)


def _first_row(header: NpyHeader, start: int, num_all: int) -> int:
    """The row of position `start`: the first, or a later one if the engine sent all positions."""
    if header.rows not in (num_all, num_all - start):
        raise unreadable(f"{header} for {num_all} positions, or {num_all - start} from {start} on")
    return start if header.rows == num_all else 0


def _decode(bulk: BulkString, header: NpyHeader, from_row: int) -> Routes:
    if bulk.num_chars != math.ceil(header.num_bytes / 3) * 4:
        raise unreadable(f"{bulk.num_chars} characters of base64 for {header}")
    begin = header.offset + from_row * header.row_bytes
    if _char_of(begin) < bulk.kept_from:
        raise unreadable(f"{header} has more positions than the request allows for")
    skipped = begin // _STEP * _STEP
    try:
        raw = pybase64.b64decode_as_bytearray(bulk.from_char(_char_of(begin)), validate=True)
    except ValueError as error:
        raise unreadable(str(error)) from None
    if skipped + len(raw) != header.num_bytes:
        raise unreadable(f"{skipped + len(raw)} bytes for {header}")
    flat: Routes = np.frombuffer(raw, header.dtype, offset=begin - skipped)
    return flat.reshape(header.rows - from_row, header.layers, header.topk)


def narrow(routes: Routes, experts: int = 0) -> Routes:
    """Routes as uint8, or uint16 where `experts` is above 256 or not known."""
    if routes.dtype in (np.uint8, np.uint16):
        return routes
    limit = experts or 1 << 16
    if routes.size and (routes.min() < 0 or routes.max() >= limit):
        raise unreadable(f"experts from {routes.min()} to {routes.max()}, expected 0 to {limit - 1}")
    return routes.astype(np.uint8 if 0 < experts <= 256 else np.uint16)


def encode_npy(routes: Routes) -> str:
    """Routes the way vLLM sends them."""
    buffer = io.BytesIO()
    np.save(buffer, routes)
    return pybase64.b64encode_as_string(buffer.getvalue())
