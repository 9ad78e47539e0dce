"""The messages between trainer and orchestrator on a socket, encoded as msgpack.

The trainer sends TrainerHello, and the orchestrator answers with TrainerWelcome, which says which step
is next. The trainer asks for a step with WantBatch. It gets the manifest as ShippedBatch as soon as that
batch is shipped. If it asked for frames, every blob follows as one raw frame behind a BlobHead. It
publishes with PublishVersion, which VersionNoted acknowledges.

After a lost connection the trainer connects again and starts with TrainerHello. Each side repeats what
was not answered, and drops what it gets twice. Numbers and texts from a trainer have bounds.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from ..errors import ProtocolError
from ..records.engine import Published
from ..records.ids import Label, Natural
from ..wire.messages import MessageDecoder

PROTOCOL = 1
MAX_TRAINER_BYTES = 16 << 20
"""The largest message a trainer may send. A connection that sends more is closed."""


class TrainerHello(Struct, frozen=True, tag="hello"):
    """A trainer connects. If another is connected, the new one takes its place."""

    name: Label = "trainer"
    protocol: Natural = PROTOCOL


class WantBatch(Struct, frozen=True, tag="want"):
    """Send the batch of `step`, with its payload as frames or without. `have` lists the blobs that
    arrived before a connection was lost; they are left out if the batch still has this checksum."""

    step: Natural
    frames: bool
    have: tuple[Natural, ...] = ()
    checksum: Natural = 0


class BytesTaken(Struct, frozen=True, tag="taken"):
    """The trainer has written `num_bytes` of raw frames, so as many more may be sent."""

    num_bytes: Natural


class PublishVersion(Struct, frozen=True, tag="publish"):
    """A version is complete. `checksum` is that of the batch it was trained on."""

    published: Published
    checksum: Natural


class TrainerWelcome(Struct, frozen=True, tag="welcome"):
    """Names the step to be trained next, the last step, and the folder with the segments, for a trainer
    that shares a file system with the run."""

    first_step: int
    last_step: int
    payload: str
    protocol: int = PROTOCOL


class ShippedBatch(Struct, frozen=True, tag="shipped"):
    """A batch: its manifest, encoded as in the run directory, and the number of blobs that follow."""

    step: int
    manifest: bytes
    num_blobs: int


class BlobHead(Struct, frozen=True, tag="blob"):
    """The raw frame behind this message is the blob of ref number `index` of a batch's manifest."""

    step: int
    index: int


class VersionNoted(Struct, frozen=True, tag="noted"):
    """A published version is recorded in the run directory."""

    version: int


class RefusedByOrchestrator(Struct, frozen=True, tag="refused"):
    """The orchestrator ends the conversation with this trainer."""

    reason: str


FromTrainer = TrainerHello | WantBatch | BytesTaken | PublishVersion
ToTrainer = TrainerWelcome | ShippedBatch | BlobHead | VersionNoted | RefusedByOrchestrator

_from_trainer = MessageDecoder[FromTrainer](FromTrainer)
_to_trainer = MessageDecoder[ToTrainer](ToTrainer)


def decode_from_trainer(frames: Sequence[bytes]) -> FromTrainer:
    if len(frames) != 1:
        raise ProtocolError(f"bad message of {len(frames)} frames")
    return _from_trainer(frames[0])


def decode_for_trainer(frames: Sequence[Any]) -> tuple[ToTrainer, Any]:
    """Decode a message received without a copy; return it with the raw frame behind it, or None."""
    try:
        message = _to_trainer(frames[0].buffer)
    except ProtocolError as error:
        raise ProtocolError(
            f"the orchestrator sent a {error}; install the same rollway on both sides"
        ) from None
    return message, frames[1] if len(frames) > 1 else None
