"""Takes batches to the trainer, and versions back. A trainer of your own needs only this:

from rollway.transport import Published, open_batches

async with open_batches("tcp://127.0.0.1:5599") as batches:
    async for batch in batches:
        folder = train(batch.manifest(), batch.reader())
        await batches.publish(Published(batch.version, folder, {"loss": 0.1}))
"""

from ..records.engine import Published
from .batch import Batch, Batches
from .open import open_batches

__all__ = ["Batch", "Batches", "Published", "open_batches"]
