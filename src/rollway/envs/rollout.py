"""A finished rollout as rewards see it, and the policy's reply of one turn."""

from typing import Any

from msgspec import Struct

from ..records.task import Message, ToolCall


class Rollout(Struct, frozen=True):
    """A finished conversation: its messages, how it ended, and what the environment noted in `info`."""

    messages: tuple[Message, ...]
    num_turns: int
    num_tokens: int
    stop: str
    info: dict[str, Any]

    @property
    def last_text(self) -> str:
        for message in reversed(self.messages):
            if message.role == "assistant":
                return message.content
        return ""


class Reply(Struct, frozen=True):
    """One turn of the policy: its text, and the tools it asks for."""

    text: str
    finish_reason: str
    num_tokens: int
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()
    """Texts that look like tool calls and cannot be read as such."""

    @property
    def truncated(self) -> bool:
        """The reply is incomplete, because it reached its token limit."""
        return self.finish_reason == "length"

    @property
    def wants_tools(self) -> bool:
        return bool(self.tool_calls or self.malformed_calls)

    @property
    def message(self) -> Message:
        return Message("assistant", self.text, self.reasoning, self.tool_calls)
