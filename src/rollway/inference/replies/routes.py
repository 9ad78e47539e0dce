"""Decodes routes as engines send them: base64 of a .npy file, or of bare integers without a header.

Only the needed positions are decoded. Decoding releases the GIL, so it may run in a thread.
"""

import io
import math

import numpy as np
import pybase64
from msgspec import Struct

from ...errors import EngineError
from ...model.shape import ModelShape
from ...records.turn import Routes
from .body import BulkString, NpyHeader, bad_routes

_ALIGNMENT = 12
"""Decoding starts at a multiple of this many bytes: a whole number of base64 quadruples, and aligned for
every type of integer."""
_INT32 = np.dtype("<i4")


class WantedRoutes(Struct, frozen=True):
    """The positions that a turn needs routes for: from `start` to the last token but one."""

    start: int
    num_prompt: int
    max_tokens: int

    def num_positions(self, num_drawn: int) -> int:
        """Return the number of all positions that have routes, counted from the first token."""
        return self.num_prompt + num_drawn - 1


def unneeded_chars(bulk: BulkString, wanted: WantedRoutes, is_prompt_only: bool) -> int:
    """Return how many characters at the start of a .npy file hold only positions before `wanted.start`.
    An engine that sent only the new positions, as it was asked to, has none. The number of positions
    tells which of the two it sent; if it does not, the answer is 0."""
    try:
        header = bulk.header
    except EngineError:
        return 0  # raised again when the bulk is decoded
    max_new = wanted.num_prompt - wanted.start
    if not is_prompt_only:
        max_new += wanted.max_tokens - 1
    if header.num_positions <= max_new or header.num_positions < wanted.num_prompt:
        return 0
    return _char_at(header.offset + wanted.start * header.position_bytes)


def _char_at(byte: int) -> int:
    """Return the character of the base64 at which decoding for `byte` starts."""
    return byte // _ALIGNMENT * _ALIGNMENT // 3 * 4


def decode_npy(bulk: BulkString, start: int, num_positions: int) -> Routes:
    """Decode the positions from `start` on. The file holds only these, or all `num_positions`."""
    return narrow(_decode(bulk, bulk.header, start, num_positions))


def decode_bare(
    bulk: BulkString, shape: ModelShape, start: int, num_positions: int
) -> Routes:
    """Do the same as `decode_npy` for bare int32 without a header."""
    position_bytes = 4 * shape.num_layers * shape.topk
    padding = bytes(bulk.from_char(max(0, bulk.num_chars - 2))).count(b"=")
    num_bytes = bulk.num_chars // 4 * 3 - padding
    num_sent, surplus = divmod(num_bytes, position_bytes)
    if surplus:
        raise bad_routes(
            f"{num_bytes} bytes do not divide into tokens of {shape.num_layers} layers × {shape.topk} "
            "int32, the shape in config.json of 'model.path'"
        )
    header = NpyHeader(0, num_sent, shape.num_layers, shape.topk, _INT32)
    return narrow(_decode(bulk, header, start, num_positions), shape.num_experts)


def _decode(bulk: BulkString, header: NpyHeader, start: int, num_positions: int) -> Routes:
    num_new = num_positions - start
    if header.num_positions not in (num_positions, num_new):
        raise bad_routes(
            f"the engine sent {header}; expected {num_positions} positions, or {num_new} from {start} on"
        )
    first = start if header.num_positions == num_positions else 0
    if bulk.num_chars != math.ceil(header.num_bytes / 3) * 4:
        raise bad_routes(
            f"the engine sent {bulk.num_chars} characters of base64 for {header}"
        )
    begin = header.offset + first * header.position_bytes
    char = _char_at(begin)
    if char < bulk.kept_from:
        raise bad_routes(f"{header} has more positions than the request allows for")
    skipped = char // 4 * 3
    try:
        raw = pybase64.b64decode_as_bytearray(bulk.from_char(char), validate=True)
    except ValueError as error:
        raise bad_routes(str(error)) from None
    if skipped + len(raw) != header.num_bytes:
        raise bad_routes(f"the engine sent {skipped + len(raw)} bytes for {header}")
    flat: Routes = np.frombuffer(raw, header.dtype, offset=begin - skipped)
    return flat.reshape(header.num_positions - first, header.layers, header.topk)


def narrow(routes: Routes, experts: int = 0) -> Routes:
    """Convert routes to uint8, or to uint16 if `experts` is above 256 or not known (0). Routes that have
    one of these types already are returned unchanged."""
    if routes.dtype in (np.uint8, np.uint16):
        return routes
    limit = experts or 1 << 16
    if routes.size and (routes.min() < 0 or routes.max() >= limit):
        named = f"from {routes.min()} to {routes.max()}"
        raise bad_routes(f"they name experts {named}, expected 0 to {limit - 1}")
    return routes.astype(np.uint8 if 0 < experts <= 256 else np.uint16)


def encode_npy(routes: Routes) -> str:
    """Encode routes the way vLLM sends them."""
    buffer = io.BytesIO()
    np.save(buffer, routes)
    return pybase64.b64encode_as_string(buffer.getvalue())
