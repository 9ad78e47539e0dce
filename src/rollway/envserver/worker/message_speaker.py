"""What a worker does for one turn of a chat where the engine speaks messages: no tokens, no rows."""

import time
from collections.abc import Sequence
from typing import Any

from ...envs.rollout import Reply
from ...inference.chat.client import ChatClient
from ...records.task import Message
from ...records.turn import Sampling
from .record import Record


class MessageSpeaker:
    """One dialogue with a chat endpoint. Tokens are as many as the endpoint says."""

    def __init__(self, client: ChatClient, sampling: Sampling, version: int, record: Record) -> None:
        self._client = client
        self._sampling = sampling
        self._version = version
        self.record = record

    def child(self) -> "MessageSpeaker":
        return MessageSpeaker(self._client, self._sampling, self._version, self.record)

    def aside(self) -> "MessageSpeaker":
        return MessageSpeaker(self._client, self._sampling, self._version, Record())

    async def generate(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        """The policy's reply to `messages`."""
        start_s = time.monotonic()
        with self.record.track.within("engine"):
            drawn = await self._client.complete(messages, self._sampling, tools)
        reply = Reply(
            text=drawn.content,
            reasoning=drawn.reasoning_content,
            finish_reason=drawn.finish_reason,
            num_tokens=drawn.num_completion_tokens,
            tool_calls=drawn.tool_calls,
        )
        self.record.versions.append(self._version)
        self.record.count(reply, time.monotonic() - start_s)
        return reply
