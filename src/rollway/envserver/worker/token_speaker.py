"""Turns of a chat with an engine of tokens: render the prompt, ask the engine, trace its reply."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...envs.chat import CONTEXT_FULL, Stopped
from ...envs.rollout import Reply
from ...inference.engines.dialect import EMPTY_PROMPT, make_prompt
from ...inference.engines.engine import Completer, Policies
from ...inference.engines.pool import EnginePool
from ...inference.rendering.rendering import Renderer
from ...records.task import Message
from ...records.turn import Ints, Sampling, Turn
from .live_rollout import LiveRollout

Tools = Sequence[dict[str, Any]]


class TokenSpeaker:
    """One conversation with the engine. A prompt repeats what was sampled before, id by id."""

    def __init__(self, engine: Completer, renderer: Renderer, live: LiveRollout) -> None:
        self._engine = engine
        self._renderer = renderer
        self._live = live
        self._history: list[Message] = []
        """The messages up to and including the last reply."""
        self._last_ids: tuple[Ints, Ints] | None = None
        """Of the last turn: its prompt and its reply. Its routes are not kept."""
        self._last_prompt = EMPTY_PROMPT

    def child(self) -> "TokenSpeaker":
        return TokenSpeaker(self._engine, self._renderer, self._live)

    def aside(self) -> "TokenSpeaker":
        return TokenSpeaker(self._engine, self._renderer, self._live.aside())

    async def generate(self, messages: list[Message], tools: Tools) -> Reply:
        live = self._live
        await live.stay_if_given_up()
        ids = await self._prompt_ids(messages, tools)
        sampling = self._fit(len(ids))
        prompt = self._last_prompt = make_prompt(ids, self._last_prompt)
        start_s = time.monotonic()
        with live.trace.place_for(ids) as place, live.within("engine"):
            turn = await self._engine.complete(
                prompt, sampling, self._renderer.stop_ids, place.routes_start
            )
            await live.stay_if_given_up()
            live.trace.add(turn, place)
            await live.spool_routes()
        live.engines[turn.engine] = None
        live.versions += [
            int(np.minimum.reduce(turn.versions)), int(np.maximum.reduce(turn.versions)),
        ]  # fmt: skip
        reply = await self._parse(turn, tools)
        live.count(reply, time.monotonic() - start_s)
        self._last_ids = turn.prompt_ids, turn.completion_ids
        self._history = [*messages, reply.message]
        return reply

    @property
    def tokens_left(self) -> int | None:
        window = self._engine.max_context
        if not window:
            return None
        num_used = sum(map(len, self._last_ids or ()))
        return max(0, window - num_used)

    def _fit(self, num_prompt: int) -> Sampling:
        """Return how to sample a reply that fits the context window. Raise Stopped if not even one token
        fits: a full context ends a rollout and does not fail it."""
        sampling, window = self._live.run.sampling, self._engine.max_context
        if not window:
            return sampling
        if num_prompt >= window:
            self._live.overrun = f"{window} tokens or more, and the engine takes {window}"
            raise Stopped(CONTEXT_FULL)
        return replace(sampling, max_tokens=min(sampling.max_tokens, window - num_prompt))

    async def _parse(self, turn: Turn, tools: Tools) -> Reply:
        parsed = await self._renderer.parse(turn.completion_ids, tools)
        return Reply(
            text=parsed.content,
            reasoning=parsed.reasoning,
            finish_reason=turn.finish_reason,
            num_tokens=len(turn.completion_ids),
            tool_calls=parsed.tool_calls,
            malformed_calls=parsed.malformed_calls,
        )

    async def _prompt_ids(self, messages: Sequence[Message], tools: Tools) -> Ints:
        """Extend the last turn if the history is untouched, else render all messages again."""
        num_old = len(self._history)
        if self._last_ids is not None and list(messages[:num_old]) == self._history:
            extended = await self._renderer.extend(*self._last_ids, messages[num_old:], tools)
            if extended is not None:
                return extended
        return await self._renderer.prompt(messages, tools)


class TokenSpeakers:
    """Speakers for engines that take and return token ids: every turn is traced."""

    def __init__(self, engines: EnginePool, renderer: Renderer, policies: Policies) -> None:
        self._engines = engines
        self._renderer = renderer
        self._policies = policies
        policies.on_new = engines.obey

    def speaker_for(self, live: LiveRollout) -> TokenSpeaker:
        engine = self._engines.pin(live.run.group, self._policies.of(live.run.client))
        return TokenSpeaker(engine, self._renderer, live)
