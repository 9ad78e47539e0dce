"""What front and core of the embedded engine say to each other. Imports nothing heavy."""

from pathlib import Path

from msgspec import Struct

from ...config.specs import EngineSpec


class DecoderCall(Struct, frozen=True):
    """One request of the front: what to do, the body as it came, and which reply is accepted."""

    id: int
    action: str
    body: bytes = b""
    accept: str = ""


class DecoderAnswer(Struct, frozen=True):
    """The answer to a call; id 0 says that the core is ready, or why it never will be."""

    id: int
    status: int
    body: bytes
    content_type: str = "application/json"


def model_name(part: EngineSpec) -> str:
    return Path(part.model.path).name
