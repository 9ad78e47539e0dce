"""A finished rollout as rewards see it."""

from typing import Any

from msgspec import Struct

from ..records.task import Message


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
