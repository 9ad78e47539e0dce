"""A micro-batch: rows laid end to end as one sequence, in which each row attends only to itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from ..errors import PayloadError
from ..payload.blob import Columns
from ..payload.reader import SegmentReader
from ..records.batch import BatchRow


class PackedMicroBatch(Struct, frozen=True):
    """Tensors of one forward pass. `targets` holds the indices of the trained tokens, each of which is
    predicted at the index before it. Positions begin at 0 in each row."""

    token_ids: Tensor
    positions: Tensor
    row_of_token: Tensor
    routes: Tensor | None
    targets: Tensor
    logprobs: Tensor
    temperatures: Tensor
    advantages: Tensor


def load_micro_batch(reader: SegmentReader, rows: Sequence[BatchRow]) -> PackedMicroBatch:
    """Copy rows from their mapped segments into one packed sequence."""
    columns = [reader.row(row) for row in rows]
    lengths = [len(row["token_ids"]) for row in columns]
    positions = np.concatenate([np.arange(length) for length in lengths])
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    # nothing predicts the first token of a row
    targets = np.flatnonzero((_join(columns, "loss_mask") != 0) & (positions > 0))
    advantages = np.array([row.advantage for row in rows], np.float32)
    return PackedMicroBatch(
        token_ids=from_numpy(_join(columns, "token_ids").astype(np.int64)),
        positions=from_numpy(positions),
        row_of_token=from_numpy(row_of_token),
        routes=_pack_routes(columns),
        targets=from_numpy(targets),
        logprobs=from_numpy(_join(columns, "logprobs")[targets]),
        temperatures=from_numpy(_join(columns, "temperatures")[targets]),
        advantages=from_numpy(advantages[row_of_token[targets]]),
    )


def _join(columns: Sequence[Columns], name: str) -> NDArray[Any]:
    return np.concatenate([row[name] for row in columns])


def _pack_routes(columns: Sequence[Columns]) -> Tensor | None:
    num_with_routes = sum("routes" in row for row in columns)
    if not num_with_routes:
        return None
    if num_with_routes < len(columns):
        raise PayloadError(
            f"only {num_with_routes} of the {len(columns)} rows of a micro-batch have routes; run every "
            "'rollway serve' with the same --routes as the run file's engine.routes"
        )
    return from_numpy(_join(columns, "routes").astype(np.int64))
