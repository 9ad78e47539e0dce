"""What a worker does for one `chat.say`: render, ask the engine, trace the turn."""

import time
from collections.abc import Sequence

import numpy as np

from ..envs.chat import Reply
from ..inference.engine import Engine
from ..inference.prompt import NO_PROMPT, prompt_of
from ..inference.rendering import Renderer
from ..records.task import Message
from ..records.turn import Ints, Sampling, Turn
from ..trace.trace import Trace
from .track import Track


class Conversation:
    """One rollout's dialogue with the engine. A prompt repeats what was sampled id by id."""

    def __init__(
        self, engine: Engine, renderer: Renderer, sampling: Sampling, track: Track
    ) -> None:  # fmt: skip
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._track = track
        self._said: list[Message] = []
        self._last: Turn | None = None
        self._asked = NO_PROMPT
        self.trace = Trace()
        self.versions: list[int] = []
        self.engine_s = 0.0

    @property
    def stop(self) -> str:
        return self._last.finish_reason if self._last else "no turn"

    async def generate(self, messages: list[Message]) -> Reply:
        """The policy's reply to `messages`."""
        ids = await self._prompt(messages)
        prompt = self._asked = prompt_of(ids, self._asked)
        start_s = time.monotonic()
        self._track.enter("engine")
        turn = await self._engine.complete(
            prompt, self._sampling, self._renderer.stop_ids, self.trace.routes_start(ids)
        )
        self.engine_s += time.monotonic() - start_s
        self._track.enter("env")
        self._track.turned(len(turn.completion_ids))
        self.trace.add(turn)
        self.versions += [int(turn.versions[0]), int(turn.versions[-1])]
        parsed = await self._renderer.parse(turn.completion_ids.tolist())
        self._last = turn
        self._said = [*messages, Message("assistant", parsed.content, parsed.reasoning)]
        return Reply(
            text=parsed.content,
            reasoning=parsed.reasoning,
            finish_reason=turn.finish_reason,
            num_tokens=len(turn.completion_ids),
        )

    async def _prompt(self, messages: Sequence[Message]) -> Ints:
        """Extend the last turn where the history is untouched, else render everything anew."""
        known = len(self._said)
        if self._last is not None and list(messages[:known]) == self._said:
            last = self._last
            extended = await self._renderer.extend(
                last.prompt_ids, last.completion_ids, messages[known:]
            )
            if extended is not None:
                return extended
        return np.array(await self._renderer.prompt(messages), np.int32)
