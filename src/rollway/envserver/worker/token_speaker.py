"""What a worker does for one turn of a chat: render, ask the engine, trace what it drew."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...envs.rollout import Reply
from ...inference.engines.dialect import EMPTY_PROMPT, make_prompt
from ...inference.engines.engine import Completer
from ...inference.rendering.rendering import Renderer
from ...records.task import Message
from ...records.turn import Ints, Sampling, Turn
from .record import Record

Tools = Sequence[dict[str, Any]]


class TokenSpeaker:
    """One dialogue with the engine. A prompt repeats what was sampled id by id."""

    def __init__(
        self, engine: Completer, renderer: Renderer, sampling: Sampling, record: Record
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._said: list[Message] = []
        self._last: Turn | None = None
        self._asked = EMPTY_PROMPT
        self.record = record

    def child(self) -> "TokenSpeaker":
        """Another dialogue whose rows join the same record."""
        return TokenSpeaker(self._engine, self._renderer, self._sampling, self.record)

    def aside(self) -> "TokenSpeaker":
        """Another dialogue of which nothing is kept."""
        return TokenSpeaker(self._engine, self._renderer, self._sampling, Record())

    async def generate(self, messages: list[Message], tools: Tools) -> Reply:
        """The policy's reply to `messages`."""
        record = self.record
        ids = await self._prompt(messages, tools)
        prompt = self._asked = make_prompt(ids, self._asked)
        start_s = time.monotonic()
        with record.trace.place_for(ids) as place, record.track.within("engine"):
            turn = await self._engine.complete(
                prompt, self._sampling, self._renderer.stop_ids, place.routes_start
            )
            record.trace.add(turn, place)
        record.versions += [int(turn.versions[0]), int(turn.versions[-1])]
        reply = await self._reply(turn, tools)
        record.count(reply, time.monotonic() - start_s)
        self._last = turn
        self._said = [*messages, reply.message]
        return reply

    async def _reply(self, turn: Turn, tools: Tools) -> Reply:
        parsed = await self._renderer.parse(turn.completion_ids.tolist(), tools)
        return Reply(
            text=parsed.content,
            reasoning=parsed.reasoning,
            finish_reason=turn.finish_reason,
            num_tokens=len(turn.completion_ids),
            tool_calls=parsed.tool_calls,
            malformed_calls=parsed.malformed_calls,
        )

    async def _prompt(self, messages: Sequence[Message], tools: Tools) -> Ints:
        """Extend the last turn where the history is untouched, else render everything anew."""
        known = len(self._said)
        if self._last is not None and list(messages[:known]) == self._said:
            last = self._last
            extended = await self._renderer.extend(
                last.prompt_ids, last.completion_ids, messages[known:], tools
            )
            if extended is not None:
                return extended
        return np.array(await self._renderer.prompt(messages, tools), np.int32)
