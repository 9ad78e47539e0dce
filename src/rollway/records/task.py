"""A task, one problem of an environment, and the messages of a conversation."""

from typing import Any, Literal

from msgspec import Struct, field

from .ids import Label

Split = Literal["train", "eval"]
"""Which of an environment's tasks are meant."""
Pool = Literal["easy", "hard"]
"""The pool of tasks that are always solved, or never. Other tasks are in no pool."""


class CalledFunction(Struct, frozen=True):
    """The name of a tool, and its arguments as the JSON text that the policy wrote."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    id: str
    function: CalledFunction
    type: str = "function"


class Message(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation. Like its tool calls it has the shape that chat APIs use."""

    role: str
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Task(Struct, frozen=True, omit_defaults=True):
    """One problem. `answer` and `info` are JSON-like values that reach the rewards unchanged."""

    id: Label
    prompt: str
    answer: Any = None
    info: dict[str, Any] = field(default_factory=dict)
