"""What a transport offers: to the orchestrator, which ships batches; to the trainer, which takes them.

Two exist. *Files*: both see the run directory, and wait for files to appear in it. *ZMQ*: the trainer
connects to the orchestrator, which keeps every batch until its version is published.
"""

from typing import Protocol, Self

from ..records.batch import BatchManifest
from ..records.ids import PolicyVersion
from ..records.policy import Published
from .batch import Batch


class Shipping(Protocol):
    """The orchestrator's side."""

    address: str
    """Where a trainer connects; empty if it finds batches in the run directory."""

    async def serve(self) -> None:
        """What has to run while batches are shipped; ends at once if that is nothing."""
        ...

    async def ship(self, manifest: BatchManifest) -> None:
        """Hand a batch to the trainer. Once this returns it outlives this process."""
        ...

    async def next_version(self, version: PolicyVersion) -> Published:
        """The record of `version`, once its weights are complete. It outlives this process."""
        ...


class Batches(Protocol):
    """The trainer's side: batches in order, until the run's last step."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Batch: ...

    async def publish(self, published: Published) -> None:
        """Say that the weights of a step lie complete in `published.path`, where the engine can read
        them. Returns once the run has noted it; the batch's payload may be gone then."""
        ...
