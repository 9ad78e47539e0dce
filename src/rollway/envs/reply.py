"""What the policy said in one turn."""

from msgspec import Struct

from ..records.task import Message, ToolCall


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
