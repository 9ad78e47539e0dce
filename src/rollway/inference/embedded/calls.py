"""The messages between the front and the decoder of the embedded engine. Imports nothing heavy."""

from pathlib import Path

from msgspec import Struct

from ...config.specs import EngineSpec
from ...model.folder import hub_name_of


class DecoderCall(Struct, frozen=True):
    """A request of the front. `action` is its path, `load` to ask for the load, or `abort` to give up
    the request with this `id`, which has no answer. The body is as it arrived."""

    id: int
    action: str
    body: bytes = b""
    accept: str = ""


class DecoderAnswer(Struct, frozen=True):
    """The answer to the call with this `id`. The first one has id 0: the decoder is ready, or failed."""

    id: int
    status: int
    body: bytes
    content_type: str = "application/json"


class DecoderFacts(Struct, frozen=True):
    """What the front tells clients about the model. The first answer of the decoder holds it."""

    max_context: int


def model_name(spec: EngineSpec) -> str:
    """Return the name under which the embedded engine serves its model."""
    return hub_name_of(spec.model.path) or Path(spec.model.path).name
