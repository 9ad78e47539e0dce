"""A micro-batch: the columns of several rows, laid end to end."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from .row_rules import UsableRow


class PackedMicroBatch(Struct, frozen=True):
    """Tensors of one forward pass. `targets` holds the indices of the trained tokens, each of which is
    predicted at the index before it."""

    token_ids: Tensor
    lengths: list[int]
    routes: Tensor | None
    targets: Tensor
    row_of_target: Tensor
    logprobs: Tensor
    has_logprob: Tensor
    """False for the tokens of approximate rows, whose logprobs are not known."""
    temperatures: Tensor
    advantages: Tensor


def pack_rows(rows: Sequence[UsableRow]) -> PackedMicroBatch:
    """Copy rows from their mapped segments into one packed sequence."""
    lengths = [row.row.num_tokens for row in rows]
    starts_row = np.concatenate([np.arange(length) == 0 for length in lengths])
    # nothing predicts the first token of a row
    targets = np.flatnonzero((_join(rows, "loss_mask") != 0) & ~starts_row)
    row_of_target = np.repeat(np.arange(len(rows)), lengths)[targets]
    advantages = np.array([row.row.advantage for row in rows], np.float32)
    is_exact = np.array([not row.row.is_approximate for row in rows])
    has_routes = "routes" in rows[0].columns
    return PackedMicroBatch(
        token_ids=from_numpy(_join(rows, "token_ids").astype(np.int64)),
        lengths=lengths,
        routes=from_numpy(_join(rows, "routes").astype(np.int64)) if has_routes else None,
        targets=from_numpy(targets),
        row_of_target=from_numpy(row_of_target),
        logprobs=from_numpy(_join(rows, "logprobs")[targets]),
        has_logprob=from_numpy(is_exact[row_of_target]),
        temperatures=from_numpy(_join(rows, "temperatures")[targets]),
        advantages=from_numpy(advantages[row_of_target]),
    )


def _join(rows: Sequence[UsableRow], name: str) -> NDArray[Any]:
    return np.concatenate([row.columns[name] for row in rows])
