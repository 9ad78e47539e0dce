"""Turns of a chat with an endpoint that takes messages. Its replies become rows if they are trained."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...envs.chat import CONTEXT_FULL, Stopped
from ...envs.rollout import Reply
from ...errors import ContextFull, EngineError
from ...inference.chat.client import ChatClient, ChatReply
from ...inference.engines.engine import ExpectedPolicy
from ...inference.rendering.rendering import ReplyTokenizer
from ...records.task import Message
from ...records.turn import Turn
from .live_rollout import LiveRollout

Tools = Sequence[dict[str, Any]]


class MessageSpeaker:
    """One conversation with a chat endpoint, which says itself how many tokens a reply has."""

    def __init__(
        self,
        client: ChatClient,
        policy: ExpectedPolicy,
        tokenizer: ReplyTokenizer | None,
        live: LiveRollout,
    ) -> None:
        self._client = client
        self._policy = policy
        self._tokenizer = tokenizer
        self._live = live
        self._num_used = 0
        """The tokens of the conversation up to the last reply, as the endpoint counts them."""

    def child(self) -> "MessageSpeaker":
        return self._for(self._live)

    def aside(self) -> "MessageSpeaker":
        return self._for(LiveRollout(self._live.run))

    def _for(self, live: LiveRollout) -> "MessageSpeaker":
        return MessageSpeaker(self._client, self._policy, self._tokenizer, live)

    @property
    def tokens_left(self) -> int | None:
        window = self._client.max_context
        return max(0, window - self._num_used) if window else None

    async def generate(self, messages: list[Message], tools: Tools) -> Reply:
        live, version = self._live, self._policy.version
        start_s = time.monotonic()
        try:
            with live.within("engine"):
                answer = await self._client.complete(messages, live.run.sampling, tools)
        except ContextFull as error:
            live.overrun = f"too many tokens ({error})"
            raise Stopped(CONTEXT_FULL) from None
        engine_s = time.monotonic() - start_s
        self._num_used = answer.num_prompt_tokens + answer.num_completion_tokens
        num_tokens = answer.num_completion_tokens
        if self._tokenizer is not None:
            turn = await self._turn(self._tokenizer, messages, tools, answer, version)
            live.trace.add(turn)
            num_tokens = len(turn.completion_ids)
        reply = Reply(
            text=answer.content,
            reasoning=answer.reasoning_content,
            finish_reason=answer.finish_reason,
            num_tokens=num_tokens,
            tool_calls=answer.tool_calls,
        )
        live.versions.append(version)
        live.count(reply, engine_s)
        return reply

    async def _turn(
        self, tokenizer: ReplyTokenizer, messages: list[Message], tools: Tools,
        answer: ChatReply, version: int,
    ) -> Turn:  # fmt: skip
        """Return the tokens of a reply: those that the endpoint returned, or else what the model's chat
        template makes of its text."""
        given = answer.tokens
        if given is not None:
            prompt_ids = np.array(given.prompt_ids, np.int32)
            completion_ids = np.array(given.completion_ids, np.int32)
            logprobs = np.array(given.logprobs, np.float32)
        else:
            is_whole = answer.finish_reason != "length"
            prompt_ids, completion_ids = await tokenizer.split(
                messages, answer.message, tools, is_whole=is_whole
            )
            logprobs = np.zeros(len(completion_ids), np.float32)
        if not len(completion_ids):
            raise EngineError(f"the reply of {self._client.url} is empty")
        return Turn(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=logprobs,
            versions=np.full(len(completion_ids), version, np.int32),
            temperature=self._live.run.sampling.temperature,
            finish_reason=answer.finish_reason,
            engine=self._client.url,
            is_approximate=given is None,
        )


class MessageSpeakers:
    """Speakers for chat endpoints that serve the same model. With a tokenizer their turns are traced,
    so that they can be trained."""

    def __init__(
        self,
        clients: Sequence[ChatClient],
        policy: ExpectedPolicy,
        tokenizer: ReplyTokenizer | None,
    ) -> None:
        self._clients = clients
        self._policy = policy
        self._tokenizer = tokenizer

    def speaker_for(self, live: LiveRollout) -> MessageSpeaker:
        client = self._clients[live.run.group % len(self._clients)]
        return MessageSpeaker(client, self._policy, self._tokenizer, live)
