"""A micro-batch: rows laid end to end as one sequence, in which each row attends only to itself."""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import PayloadError
from ..payload.reader import SegmentReader
from ..records.batch import BatchRow


class PackedMicroBatch(Struct, frozen=True):
    """Tensors of one forward pass over T tokens, of which N are trained.

    `targets` holds the indices of the trained tokens; token `targets[i]` is predicted at index
    `targets[i] - 1`. Positions begin at 0 in each row.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_of_token: torch.Tensor
    routes: torch.Tensor | None
    targets: torch.Tensor
    logprobs: torch.Tensor
    temperatures: torch.Tensor
    advantages: torch.Tensor


def load_micro_batch(reader: SegmentReader, rows: Sequence[BatchRow]) -> PackedMicroBatch:
    """Copy rows from their mapped segments into one packed sequence."""
    columns = [reader.row(row) for row in rows]
    lengths = [len(row["token_ids"]) for row in columns]
    starts = np.cumsum([0, *lengths[:-1]])
    trained = [_trained_indices(row["loss_mask"]) for row in columns]
    targets = np.concatenate([indices + start for indices, start in zip(trained, starts, strict=True)])

    def select_trained(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([row[name] for row in columns])[targets])

    return PackedMicroBatch(
        token_ids=torch.from_numpy(
            np.concatenate([row["token_ids"] for row in columns]).astype(np.int64)
        ),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        row_of_token=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
        routes=_pack_routes(columns),
        targets=torch.from_numpy(targets),
        logprobs=select_trained("logprobs"),
        temperatures=select_trained("temperatures"),
        advantages=torch.from_numpy(
            np.repeat([row.advantage for row in rows], list(map(len, trained))).astype(np.float32)
        ),
    )


def _trained_indices(loss_mask: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return the indices of the trained tokens. Nothing predicts the first token of a row."""
    indices = np.flatnonzero(loss_mask)
    return indices[indices > 0]


def _pack_routes(columns: Sequence[dict[str, NDArray[np.generic]]]) -> torch.Tensor | None:
    num_with_routes = sum("routes" in row for row in columns)
    if not num_with_routes:
        return None
    if num_with_routes < len(columns):
        raise PayloadError(
            f"only {num_with_routes} of the {len(columns)} rows of a micro-batch have routes; run every "
            "'rollway serve' with the same --routes as the run file's engine.routes"
        )
    return torch.from_numpy(np.concatenate([row["routes"] for row in columns]).astype(np.int64))
