"""A batch: which rows the trainer takes for one optimizer step. Refs and numbers, no tokens."""

from msgspec import Struct

from .ids import PolicyVersion, RolloutId, Step
from .payload import PayloadRef


class BatchRow(Struct, frozen=True):
    """Row `row` of the blob at `ref`, and the advantage of all its trainable tokens."""

    rollout_id: RolloutId
    ref: PayloadRef
    row: int
    num_tokens: int
    num_trainable: int
    advantage: float


class BatchManifest(Struct, frozen=True):
    """The rows of one step and how they are packed: `ranks` holds, for each rank of the trainer, its
    micro-batches, each of them indices into `rows`.

    Every row stands in exactly one micro-batch, and every rank has as many micro-batches as any other.
    An empty one is padding for a rank that has no rows left: it joins what the others do together, and
    adds nothing.
    """

    step: Step
    trains_version: PolicyVersion
    rows: tuple[BatchRow, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """Those of all ranks, without padding."""
        return tuple(one for rank in self.ranks for one in rank if one)

    @property
    def refs(self) -> tuple[PayloadRef, ...]:
        """The blobs of these rows, each once, in order: rows of one rollout share one."""
        return tuple(dict.fromkeys(row.ref for row in self.rows))

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
