"""A finished rollout as rewards see it."""

from typing import Any

from msgspec import Struct

from ..records.task import Message, ToolCall


class Rollout(Struct, frozen=True):
    """What was said, how it ended, and what the environment noted along the way."""

    messages: tuple[Message, ...]
    num_turns: int
    num_tokens: int
    stop: str
    info: dict[str, Any]

    @property
    def reply(self) -> str:
        """The policy's last answer."""
        return next((one.content for one in reversed(self.messages) if one.role == "assistant"), "")


class Reply(Struct, frozen=True):
    """A turn of the policy: its text, and the tools it wants to be called."""

    text: str
    finish_reason: str
    num_tokens: int
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()
    """What was meant as a call and cannot be read as one."""

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut it short."""
        return self.finish_reason == "length"

    @property
    def wants_tools(self) -> bool:
        return bool(self.tool_calls or self.malformed_calls)

    @property
    def message(self) -> Message:
        return Message("assistant", self.text, self.reasoning, self.tool_calls)
