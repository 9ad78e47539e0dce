"""Expert choices of a turn: which of them are new to a row, and whether they can be right.

An engine reports routes for the positions it processed: from `routes_start` to the last token but
one. A row of n tokens therefore knows n − 1 routes, and the next turn's reply brings the missing one.
"""

import numpy as np

from ..errors import TraceError
from ..records.turn import Routes, Turn

_DTYPES = np.dtype(np.uint8), np.dtype(np.uint16)


def wanted_start(num_row_tokens: int) -> int:
    """From which position a turn that extends a row of this length needs routes."""
    return max(0, num_row_tokens - 1)


def new_routes(turn: Turn, num_row_tokens: int) -> Routes:
    """The routes a row of `num_row_tokens` does not have yet. A copy, so that the rest can be freed."""
    assert turn.routes is not None
    skip = wanted_start(num_row_tokens) - turn.routes_start
    return turn.routes[skip:].copy() if skip else turn.routes


def check_routes(turn: Turn, *, has_routes: bool) -> None:
    """Refuse a turn whose routes do not cover its positions, or appear in some turns only."""
    if (turn.routes is not None) != has_routes:
        had = "had" if has_routes else "had no"
        raise TraceError(
            f"the engine's reply {'lacks' if has_routes else 'has'} routes, the row {had} routes"
        )
    if turn.routes is None:
        return
    if turn.routes.dtype not in _DTYPES or turn.routes.ndim != 3:
        raise TraceError(
            f"routes are {turn.routes.dtype}{list(turn.routes.shape)}, "
            "expected uint8 or uint16 [tokens, layers, topk]"
        )
    expected = len(turn.prompt_ids) + len(turn.completion_ids) - 1 - turn.routes_start
    if len(turn.routes) != expected:
        raise TraceError(
            f"routes of {len(turn.routes)} tokens from position {turn.routes_start}, expected "
            f"{expected} for {len(turn.prompt_ids)} prompt and {len(turn.completion_ids)} reply tokens"
        )
