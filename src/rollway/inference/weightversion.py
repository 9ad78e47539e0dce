"""What engines say of the weights they have. Pure."""

import msgspec
from msgspec import Struct

from ..errors import UNREADABLE

UNTOUCHED = ("0", "default")
"""What an engine says that was never given weights: it has those it was started with."""


class _Answer(Struct, frozen=True):
    weight_version: str | int | None = None


def version_in(body: bytes | bytearray) -> str:
    """The version in an engine's answer; empty if it does not say."""
    try:
        said = msgspec.json.decode(body, type=_Answer).weight_version
    except UNREADABLE:
        return ""
    return "" if said is None else str(said)


def is_at(said: str, version: int) -> bool:
    """Whether that is exactly this version."""
    return said == str(version) or (version == 0 and said in UNTOUCHED)


def has_at_least(said: str, version: int) -> bool:
    """Whether that is this version or a later one."""
    return is_at(said, version) or (said.isdigit() and int(said) >= version)
