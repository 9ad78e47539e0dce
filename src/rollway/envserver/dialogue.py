"""What a worker does for one `chat.say` where the engine speaks messages: no tokens, no rows."""

import time

from ..envs.chat import Reply
from ..inference.chatcompletions import ChatClient
from ..records.task import Message
from ..records.turn import Sampling
from ..trace.row import Row


class Dialogue:
    """One rollout's dialogue with a chat endpoint. Tokens are as many as the endpoint says."""

    def __init__(self, client: ChatClient, sampling: Sampling, version: int) -> None:
        self._client = client
        self._sampling = sampling
        self.stop = "no turn"
        self.num_turns = 0
        self.num_sampled = 0
        self.versions = [version]
        self.engine_s = 0.0

    async def generate(self, messages: list[Message]) -> Reply:
        """The policy's reply to `messages`."""
        start_s = time.monotonic()
        drawn = await self._client.complete(messages, self._sampling)
        self.engine_s += time.monotonic() - start_s
        self.num_turns += 1
        self.num_sampled += drawn.num_completion_tokens
        self.stop = drawn.finish_reason
        return Reply(
            text=drawn.content,
            reasoning=drawn.reasoning_content,
            finish_reason=drawn.finish_reason,
            num_tokens=drawn.num_completion_tokens,
        )

    def rows(self) -> tuple[Row, ...]:
        """None: nothing can be trained from messages alone."""
        return ()
