"""The header of a .npy file of routes, from the first characters of its base64."""

import re
from typing import Any

import numpy as np
import pybase64
from msgspec import Struct

from ...errors import EngineError

_HEADER = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|\x02\x00....)"
    rb"\{'descr': '([<|=][a-z][0-9]+)', 'fortran_order': (True|False), 'shape': \(([0-9, ]*)\), \} *\n",
    re.DOTALL,
)
_AXIS = re.compile(rb"[0-9]+")


class NpyHeader(Struct, frozen=True):
    """How rows lie in the decoded bytes."""

    offset: int
    rows: int
    layers: int
    topk: int
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        return self.layers * self.topk * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.offset + self.rows * self.row_bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{self.rows}, {self.layers}, {self.topk}]"


def read_header(text: bytes) -> NpyHeader:
    """Raises EngineError where it is not that of integers `[tokens, layers, topk]`."""
    try:
        raw = pybase64.b64decode(text[: len(text) // 4 * 4], validate=True)
    except ValueError as error:
        raise unreadable(str(error)) from None
    match = _HEADER.match(raw)
    if match is None:
        raise unreadable("they are not a .npy file")
    descr, fortran, shape = match.groups()
    try:
        dtype = np.dtype(descr.decode())
    except TypeError as error:
        raise unreadable(str(error)) from None
    if dtype.kind not in "ui":
        raise unreadable(f"{dtype} is not a type of integers")
    axes = [int(axis) for axis in _AXIS.findall(shape)]
    if len(axes) != 3 or fortran == b"True":
        raise unreadable(f"{dtype}{axes} is not [tokens, layers, topk]")
    rows, layers, topk = axes
    return NpyHeader(match.end(), rows, layers, topk, dtype)


def unreadable(why: str) -> EngineError:
    return EngineError(f"the engine's routes cannot be read: {why}")
