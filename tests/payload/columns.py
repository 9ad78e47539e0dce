"""Hypothesis strategies for the columns of a blob."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from rollway.payload.blob import Blob, seal

DTYPES = [np.uint8, np.uint16, np.int32, np.float32]


@st.composite
def columns(draw: st.DrawFn) -> dict[str, list[Any]]:
    """Columns of any dtype, shape and number of chunks; chunks may be empty or strided."""
    drawn = {}
    for index in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        tail = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        step = draw(st.integers(1, 2))
        drawn[f"row0.c{index}"] = [
            np.arange(np.prod((size * step, *tail)), dtype=dtype).reshape(size * step, *tail)[
                ::step
            ]
            for size in sizes
        ]
    return drawn


def as_bytes(blob: Blob, segment: str = "") -> bytes:
    return b"".join(seal(blob, segment))
