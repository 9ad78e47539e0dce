"""What front and core of the trainer say to each other. Imports nothing heavy."""

from msgspec import Struct

from ..config.parts import TrainerPart
from ..records.policy import Published
from ..transport.batch import Batch


class Start(Struct, frozen=True):
    """What a core is given first: its rank, and the file through which the ranks find each other."""

    part: TrainerPart
    rank: int = 0
    meeting: str = ""


class Train(Struct, frozen=True):
    """Take one step from this batch: this rank's part of it."""

    batch: Batch


class Loaded(Struct, frozen=True, tag="loaded"):
    """The model is in memory."""


class Trained(Struct, frozen=True, tag="trained"):
    """The step is taken and its weights are written."""

    published: Published


class TookPart(Struct, frozen=True, tag="took_part"):
    """The step is taken by this rank too; the first one writes its weights."""


class Troubled(Struct, frozen=True, tag="troubled"):
    """The core ends because of this."""

    error: str


Answer = Loaded | Trained | TookPart | Troubled
