"""A task: one problem of an environment, and the messages it is told in."""

from typing import Any, Literal

from msgspec import Struct, field

from .ids import Label

Split = Literal["train", "eval"]
"""Which of an environment's tasks."""
Pool = Literal["easy", "hard"]
"""Where a task is that is not normal: always solved, or never."""


class CalledFunction(Struct, frozen=True):
    """Which tool, and its arguments as JSON text, as the policy wrote them."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    """A tool the policy wants to be called, in the shape chat APIs use."""

    id: str
    function: CalledFunction
    type: str = "function"


class Message(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, in the shape chat APIs use."""

    role: str
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Task(Struct, frozen=True, omit_defaults=True):
    """One problem. `answer` and `info` are JSON-like and reach rewards untouched."""

    id: Label
    prompt: str
    answer: Any = None
    info: dict[str, Any] = field(default_factory=dict)
