"""Columns that a turn may bring beside the usual ones: reference logprobs, weights, anything per token.

A row has a column as soon as one of its turns brings it. Where there is no value it is filled:

                     prompt tokens   drawn by a turn without it
    token_weights    1               1
    others           0               NaN: not known, and loud in any arithmetic
"""

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import TraceError
from ..records.turn import Floats, Turn

TOKEN_WEIGHTS = "token_weights"
"""Factors on the loss of each token."""
_TAKEN = {"token_ids", "loss_mask", "logprobs", "temperatures", "versions", "routes"}


def check_extra(turn: Turn) -> None:
    """Refuse columns that do not fit the reply, or the name of another column."""
    for name, column in turn.extra.items():
        if name in _TAKEN or not name.isidentifier():
            raise TraceError(f"a turn's extra column cannot be called '{name}'")
        if column.dtype != np.float32 or column.shape != turn.completion_ids.shape:
            raise TraceError(
                f"extra column '{name}' is {column.dtype}{list(column.shape)}, expected "
                f"float32[{len(turn.completion_ids)}]: one value for each reply token"
            )


def laid_out(num_tokens: int, spans: Iterable[tuple[int, int, dict[str, Floats]]]) -> dict[str, Floats]:
    """Whole columns from spans of prompt tokens, drawn tokens and what came with these."""
    columns: dict[str, Floats] = {}
    known = list(spans)
    for name in _names([extra for _, _, extra in known]):
        in_prompt, missing = (1.0, 1.0) if name == TOKEN_WEIGHTS else (0.0, np.nan)
        column = columns[name] = np.full(num_tokens, in_prompt, np.float32)
        end = 0
        for num_prompt, num_drawn, extra in known:
            start, end = end + num_prompt, end + num_prompt + num_drawn
            column[start:end] = extra.get(name, missing)
    return columns


def _names(extras: Sequence[dict[str, Floats]]) -> list[str]:
    """All names, in the order they appeared."""
    return list(dict.fromkeys(name for extra in extras for name in extra))
