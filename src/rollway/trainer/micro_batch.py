"""A micro-batch: rows laid end to end as one sequence, each seeing only itself."""

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

    `targets` are positions of trained tokens; token `targets[i]` is predicted at `targets[i] - 1`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    routes: torch.Tensor | None
    targets: torch.Tensor
    logprobs: torch.Tensor
    temperatures: torch.Tensor
    advantages: torch.Tensor
    token_weights: torch.Tensor


def load_micro_batch(reader: SegmentReader, rows: Sequence[BatchRow]) -> PackedMicroBatch:
    """Copy rows from their mapped segments into one packed sequence."""
    parts = [reader.row(row) for row in rows]
    lengths = [len(part["token_ids"]) for part in parts]
    starts = np.cumsum([0, *lengths[:-1]])
    masks = [_trained(part["loss_mask"]) for part in parts]
    targets = np.concatenate([at + start for at, start in zip(masks, starts, strict=True)])

    def picked(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([p[name] for p in parts])[targets])

    for part in parts:
        part.setdefault("token_weights", np.ones(len(part["token_ids"]), np.float32))

    return PackedMicroBatch(
        token_ids=torch.from_numpy(np.concatenate([p["token_ids"] for p in parts]).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        segments=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
        routes=_routes(parts),
        targets=torch.from_numpy(targets),
        logprobs=picked("logprobs"),
        temperatures=picked("temperatures"),
        advantages=torch.from_numpy(
            np.repeat([row.advantage for row in rows], [len(at) for at in masks]).astype(np.float32)
        ),
        token_weights=picked("token_weights"),
    )


def _trained(loss_mask: NDArray[np.generic]) -> NDArray[np.int64]:
    """Positions of trained tokens. The first token of a row has nothing before it to predict it."""
    at = np.flatnonzero(loss_mask)
    return at[at > 0]


def _routes(parts: Sequence[dict[str, NDArray[np.generic]]]) -> torch.Tensor | None:
    with_routes = sum("routes" in part for part in parts)
    if not with_routes:
        return None
    if with_routes < len(parts):
        raise PayloadError("some rows of a micro-batch have routes and some have none")
    return torch.from_numpy(np.concatenate([part["routes"] for part in parts]).astype(np.int64))
