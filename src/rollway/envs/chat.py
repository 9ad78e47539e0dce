"""The conversation an environment holds with the policy."""

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from ..records.task import Message


class Reply(Struct, frozen=True):
    """What the policy said in one turn."""

    text: str
    finish_reason: str
    num_tokens: int
    reasoning: str | None = None

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut it short."""
        return self.finish_reason == "length"


Generate = Callable[[list[Message]], Awaitable[Reply]]


class Chat:
    """One rollout's conversation. Every `say` is one turn, recorded token by token.

    `info` is the environment's own notebook for this rollout: JSON-like values that rewards find in
    `rollout.info`.
    """

    def __init__(self, generate: Generate, system_prompt: str = "") -> None:
        self._generate = generate
        self.messages: list[Message] = []
        self.replies: list[Reply] = []
        self.info: dict[str, Any] = {}
        if system_prompt:
            self.messages.append(Message("system", system_prompt))

    async def say(self, content: str) -> Reply:
        """Say something as the user and return the policy's answer."""
        if not isinstance(content, str):
            raise TypeError(f"chat.say takes a string, not {type(content).__name__}")
        self.messages.append(Message("user", content))
        reply = await self._generate(self.messages)
        self.messages.append(Message("assistant", reply.text, reply.reasoning))
        self.replies.append(reply)
        return reply
