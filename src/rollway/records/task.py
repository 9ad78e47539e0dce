"""A task: one problem of an environment, and the messages it is told in."""

from typing import Any

from msgspec import Struct, field

from .bounds import Label


class Message(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, in the shape chat APIs use."""

    role: str
    content: str
    reasoning_content: str | None = None


class Task(Struct, frozen=True, omit_defaults=True):
    """One problem. `answer` and `info` are JSON-like and reach rewards untouched."""

    id: Label
    prompt: str
    answer: Any = None
    info: dict[str, Any] = field(default_factory=dict)
