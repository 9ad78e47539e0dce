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
    """The rows of one step and how they are packed: `micro_batches` holds indices into `rows`."""

    step: Step
    trains_version: PolicyVersion
    rows: tuple[BatchRow, ...]
    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
