"""What front and core of the trainer say to each other. Imports nothing heavy."""

from msgspec import Struct

from ..records.policy import Published


class Train(Struct, frozen=True):
    """Take one step from this manifest."""

    manifest: str


class Loaded(Struct, frozen=True, tag="loaded"):
    """The model is in memory."""


class Trained(Struct, frozen=True, tag="trained"):
    """The step is taken and its weights are written."""

    published: Published


class Troubled(Struct, frozen=True, tag="troubled"):
    """The core ends because of this."""

    error: str


Answer = Loaded | Trained | Troubled
