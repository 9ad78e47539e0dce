"""Turns of a chat with an endpoint that takes messages. Its replies become rows if they are trained."""

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
from msgspec import Struct

from ...envs.chat import CONTEXT_FULL, Stopped
from ...envs.rollout import Reply
from ...errors import ContextFull
from ...inference.chat.client import ChatClient, ChatReply
from ...inference.engines.engine import ExpectedPolicy, Policies
from ...inference.rendering.rendering import ReplyTokenizer
from ...inference.replies.checks import ReplyRules
from ...inference.replies.columns import make_columns
from ...loop.lanes.lanes import ProcessLane
from ...loop.watch.run import LoopWatch
from ...records.task import Message
from ...records.turn import Turn
from .kit import GREETING, Prepared
from .live_rollout import LiveRollout

Tools = Sequence[dict[str, Any]]
WHOLE = ("stop", "tool_calls", "function_call")
"""How a chat endpoint ends a reply that the policy has ended."""


class ReplyTokens(Struct, frozen=True):
    """Makes trainable turns of chat replies: a tokenizer for those without token ids, and rules that all
    token ids must obey."""

    tokenizer: ReplyTokenizer
    rules: ReplyRules


class MessageSpeaker:
    """One conversation with a chat endpoint, which says itself how many tokens a reply has."""

    def __init__(
        self,
        client: ChatClient,
        policy: ExpectedPolicy,
        tokens: ReplyTokens | None,
        live: LiveRollout,
    ) -> None:
        self._client = client
        self._policy = policy
        self._tokens = tokens
        self._live = live
        self._num_used = 0
        """The tokens of the conversation up to the last reply, as the endpoint counts them."""

    def child(self) -> "MessageSpeaker":
        return MessageSpeaker(self._client, self._policy, self._tokens, self._live)

    def aside(self) -> "MessageSpeaker":
        return MessageSpeaker(self._client, self._policy, None, self._live.aside())

    @property
    def tokens_left(self) -> int | None:
        window = self._client.max_context
        return max(0, window - self._num_used) if window else None

    async def generate(self, messages: list[Message], tools: Tools) -> Reply:
        live, version = self._live, self._policy.version
        await live.stay_if_given_up()
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
        if self._tokens is not None:
            turn = await self._turn(self._tokens, messages, tools, answer, version)
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
        self, tokens: ReplyTokens, messages: list[Message], tools: Tools, answer: ChatReply,
        version: int,
    ) -> Turn:  # fmt: skip
        """Return the tokens of a reply: those that the endpoint returned, or else what the model's chat
        template makes of its text."""
        given, temperature = answer.tokens, self._live.run.sampling.temperature
        reason = "stop" if answer.finish_reason in WHOLE else answer.finish_reason
        if given is not None:
            prompt_ids, drawn_ids = given.prompt_ids, given.completion_ids
        else:
            prompt_ids, drawn_ids = await tokens.tokenizer.split(
                messages, answer.message, tools, is_whole=reason != "length"
            )
        # at other temperatures nothing shows whether logprobs are those of the draw
        is_exact = given is not None and temperature == 1
        logprobs = given.logprobs if given and is_exact else [0.0] * len(drawn_ids)
        drawn = make_columns(drawn_ids, logprobs, None, reason)
        tokens.rules.check_columns(drawn, version)
        return Turn(
            prompt_ids=np.array(prompt_ids, np.int32),
            completion_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            versions=np.full(len(drawn_ids), version, np.int32),
            temperature=temperature,
            finish_reason=answer.finish_reason,
            engine=self._client.url,
            is_approximate=not is_exact,
        )


class MessageSpeakers:
    """Speakers for chat endpoints that serve the same model. With `tokens` their turns are traced, so
    that they can be trained."""

    def __init__(
        self,
        clients: Sequence[ChatClient],
        policies: Policies,
        tokens: ReplyTokens | None,
    ) -> None:
        self._clients = clients
        self._policies = policies
        self._tokens = tokens

    def speaker_for(self, live: LiveRollout) -> MessageSpeaker:
        client = self._clients[live.run.group % len(self._clients)]
        policy = self._policies.of(live.run.client)
        return MessageSpeaker(client, policy, self._tokens, live)


@asynccontextmanager
async def open_chat(prepared: Prepared, watch: LoopWatch) -> AsyncIterator["MessageSpeakers"]:
    """Connect to chat endpoints. Their replies are tokenised only if the run trains on them."""
    part, server = prepared.part, prepared.part.server
    engine, key = server.engine, os.environ.get(server.engine.key_var or "", "")
    tokenising = ProcessLane(
        f"{part.name}.tokenise", 1, label="tokenising", watch=watch,
        max_waiting=4 * server.env.local.concurrency,
    )  # fmt: skip
    async with tokenising, AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                ChatClient(url, engine.model or "", key, deadline_s=engine.request_deadline_s)
            )
            for url in server.engine_urls
        ]
        for client in clients:
            await client.check(engine.patience_s if part.is_patient else 0.0)
            if prepared.greeting:
                await client.ask_for_ids(GREETING, prepared.greeting)
        tokenizer = ReplyTokenizer(server.model, tokenising)
        tokens = ReplyTokens(tokenizer, prepared.rules) if server.is_training else None
        yield MessageSpeakers(clients, prepared.policies, tokens)
