"""The expert choices of a turn: which of them are new to a row, and whether they can be right.

An engine reports routes for the positions it processed: from `routes_start` to the last token but
one. A row of n tokens therefore knows n − 1 routes, and the next turn's reply brings the missing one.
"""

import numpy as np
from msgspec import Struct

from ..errors import TraceError
from ..records.turn import Routes, SpooledRoutes, Turn


class RouteChunk(Struct, eq=False):
    """The routes of one turn that are new to a row: in memory, or where a file holds them."""

    routes: Routes | SpooledRoutes

    @property
    def in_memory(self) -> Routes:
        assert not isinstance(self.routes, SpooledRoutes)
        return self.routes


_DTYPES = np.dtype(np.uint8), np.dtype(np.uint16)


def first_position(num_row_tokens: int) -> int:
    """Return the first position whose routes a turn must bring to a row of this length."""
    return max(0, num_row_tokens - 1)


def new_routes(turn: Turn, num_row_tokens: int) -> Routes:
    """Return the routes that are new to a row: a copy if there are others, so that those are freed."""
    assert turn.routes is not None
    skip = first_position(num_row_tokens) - turn.routes_start
    return turn.routes[skip:].copy() if skip else turn.routes


def check_routes(turn: Turn, *, has_routes: bool) -> None:
    """Raise TraceError if the routes do not cover the turn's positions, or only some turns have them."""
    routes, start = turn.routes, turn.routes_start
    if routes is None:
        if has_routes:
            raise TraceError(
                "the engine's reply has no routes, but earlier turns of its row had them"
            )
        return
    if not has_routes:
        raise TraceError(
            "the engine's reply has routes, but earlier turns of its row had none"
        )
    if routes.dtype not in _DTYPES or routes.ndim != 3:
        raise TraceError(
            f"the engine's routes are {routes.dtype}{list(routes.shape)}; "
            "uint8 or uint16 [tokens, layers, topk] was expected"
        )
    num_prompt, num_reply = len(turn.prompt_ids), len(turn.completion_ids)
    expected = num_prompt + num_reply - 1 - start
    if len(routes) != expected:
        raise TraceError(
            f"the engine returned routes of {len(routes)} tokens from position {start}; {expected} "
            f"were expected for {num_prompt} prompt tokens and {num_reply} reply tokens"
        )
