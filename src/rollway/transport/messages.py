"""What trainer and orchestrator say to each other on a socket.

A trainer says TrainerHello, is told where the run stands, and says which step it wants; it gets that batch's
manifest as soon as it is shipped, and if it asked for frames every blob of it, each as one raw frame
behind its header. A lost connection begins anew with TrainerHello: whatever was not answered is said again, and
what comes twice is dropped. Messages are msgpack; numbers and texts of a trainer's have bounds.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import UNREADABLE, ProtocolError
from ..records.engine import Published
from ..records.ids import Label, Natural

PROTOCOL = 1
MAX_TRAINER_BYTES = 16 << 20
"""A message of a trainer's. The connection of one that sends more is closed."""


class TrainerHello(Struct, frozen=True, tag="hello"):
    """A trainer is there. If another was before, this one takes its place."""

    name: Label = "trainer"
    protocol: Natural = PROTOCOL


class WantBatch(Struct, frozen=True, tag="want"):
    """Send the batch of `step`, with its payload as frames or without. `have` are the blobs that came
    before a connection was lost, if the batch still has that checksum."""

    step: Natural
    frames: bool
    have: tuple[Natural, ...] = ()
    checksum: Natural = 0


class BytesTaken(Struct, frozen=True, tag="taken"):
    """`num_bytes` of raw frames are written: as many more may be sent."""

    num_bytes: Natural


class PublishVersion(Struct, frozen=True, tag="publish"):
    """A version is complete; the checksum is that of the batch it was trained on."""

    published: Published
    checksum: Natural


class TrainerWelcome(Struct, frozen=True, tag="welcome"):
    """Where the run stands: the step to be trained next, and the last. `payload` is the folder with the
    segments, for a trainer that can see it."""

    first_step: int
    last_step: int
    payload: str
    protocol: int = PROTOCOL


class ShippedBatch(Struct, frozen=True, tag="shipped"):
    """A batch: its manifest as it lies in the run directory, and how many blobs follow."""

    step: int
    manifest: bytes
    num_blobs: int


class BlobHead(Struct, frozen=True, tag="blob"):
    """The raw frame behind this is a blob of a batch: number `index` of its manifest's refs."""

    step: int
    index: int


class VersionNoted(Struct, frozen=True, tag="noted"):
    """A version's publication is noted, for good."""

    version: int


class TrainerRefused(Struct, frozen=True, tag="refused"):
    """The orchestrator has nothing more to say to this trainer."""

    reason: str


FromTrainer = TrainerHello | WantBatch | BytesTaken | PublishVersion
ToTrainer = TrainerWelcome | ShippedBatch | BlobHead | VersionNoted | TrainerRefused

_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
encode = msgspec.msgpack.encode


def from_trainer(frames: Sequence[bytes]) -> FromTrainer:
    try:
        (frame,) = frames
        return _from_trainer.decode(frame)
    except (ValueError, *UNREADABLE) as error:
        raise ProtocolError(f"bad message of {len(frames)} frames: {ascii(str(error))[:200]}") from None


def for_trainer(frames: Sequence[Any]) -> tuple[ToTrainer, Any]:
    """A message as it came without a copy, and the raw frame behind it or None."""
    try:
        message = _to_trainer.decode(frames[0].buffer)
    except UNREADABLE as error:
        raise ProtocolError(f"the orchestrator says what is no message: {error}") from None
    return message, frames[1] if len(frames) > 1 else None
