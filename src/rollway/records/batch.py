"""A batch: the rows of one optimizer step, as refs and numbers, without tokens."""

from collections.abc import Set as AbstractSet

from msgspec import Struct
from msgspec.structs import replace

from .ids import PolicyVersion, RolloutId, Step
from .payload import PayloadRef


class BatchRow(Struct, frozen=True):
    """Row number `row` of the blob at `ref`, and the advantage of all its trainable tokens."""

    rollout_id: RolloutId
    ref: PayloadRef
    row: int
    num_tokens: int
    num_trainable: int
    advantage: float
    engine: str = ""
    """The address of the engine that drew the row, if it was one engine and the version that is trained
    now: between the two there is only rounding."""
    is_approximate: bool = False
    """The endpoint gave no token ids or no logprobs: the row's logprobs are 0 and mean nothing."""


class BatchManifest(Struct, frozen=True):
    """The rows of one step and how they are packed: `ranks` holds, for each rank of the trainer, its
    micro-batches, each of them indices into `rows`. Every row is in exactly one micro-batch, and every
    rank has the same number of micro-batches. An empty micro-batch is padding for a rank that has no
    rows left: the rank takes part in the collective operations and adds nothing."""

    step: Step
    trains_version: PolicyVersion
    rows: tuple[BatchRow, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of all ranks, without padding."""
        return tuple(rows for rank in self.ranks for rows in rank if rows)

    @property
    def refs(self) -> tuple[PayloadRef, ...]:
        """The blobs of these rows, each once and in order. Rows of one rollout share a blob."""
        return tuple(dict.fromkeys(row.ref for row in self.rows))

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def without(self, rows: AbstractSet[int]) -> "BatchManifest":
        """Return the same batch, packed without some of its rows."""
        ranks = tuple(
            tuple(tuple(row for row in packed if row not in rows) for packed in rank)
            for rank in self.ranks
        )
        return replace(self, ranks=ranks)


class LeftOutRow(Struct, frozen=True):
    """A row of a batch that the trainer could not use."""

    rollout_id: RolloutId
    row: int
    reason: str
