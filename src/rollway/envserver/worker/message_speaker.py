"""Turns of a chat with an endpoint that answers with messages: no tokens, so no rows."""

import time
from collections.abc import Sequence
from typing import Any

from ...envs.chat import CONTEXT_FULL, Stopped
from ...envs.rollout import Reply
from ...errors import ContextFull
from ...inference.chat.client import ChatClient
from ...inference.engines.engine import ExpectedPolicy
from ...records.task import Message
from .live_rollout import LiveRollout


class MessageSpeaker:
    """One conversation with a chat endpoint, which says itself how many tokens a reply has."""

    def __init__(self, client: ChatClient, version: int, live: LiveRollout) -> None:
        self._client = client
        self._version = version
        self._live = live
        self._num_used = 0
        """The tokens of the conversation up to the last reply, as the endpoint counts them."""

    def child(self) -> "MessageSpeaker":
        return MessageSpeaker(self._client, self._version, self._live)

    def aside(self) -> "MessageSpeaker":
        return MessageSpeaker(self._client, self._version, LiveRollout(self._live.run))

    @property
    def tokens_left(self) -> int | None:
        window = self._client.max_context
        return max(0, window - self._num_used) if window else None

    async def generate(
        self, messages: list[Message], tools: Sequence[dict[str, Any]]
    ) -> Reply:
        live = self._live
        start_s = time.monotonic()
        try:
            with live.within("engine"):
                answer = await self._client.complete(messages, live.run.sampling, tools)
        except ContextFull as error:
            live.overrun = f"too many tokens ({error})"
            raise Stopped(CONTEXT_FULL) from None
        self._num_used = answer.num_prompt_tokens + answer.num_completion_tokens
        reply = Reply(
            text=answer.content,
            reasoning=answer.reasoning_content,
            finish_reason=answer.finish_reason,
            num_tokens=answer.num_completion_tokens,
            tool_calls=answer.tool_calls,
        )
        live.versions.append(self._version)
        live.count(reply, time.monotonic() - start_s)
        return reply


class MessageSpeakers:
    """Speakers for a chat endpoint: good for evaluation, useless for training."""

    def __init__(self, client: ChatClient, policy: ExpectedPolicy) -> None:
        self._client = client
        self._policy = policy

    def speaker_for(self, live: LiveRollout) -> MessageSpeaker:
        return MessageSpeaker(self._client, self._policy.version, live)
