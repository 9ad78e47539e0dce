"""A model that judges: what a reward asks when it needs an opinion."""

import math
import os
import re

from ...errors import EngineError
from ...records.task import Message
from ...records.turn import Sampling
from .client import ChatClient

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Judge:
    """Asks a model at an OpenAI-compatible endpoint. Make one in the environment's `__init__`, and
    await it in an async reward. The key is read from the environment variable `key_var`."""

    def __init__(
        self, url: str, model: str, *, key_var: str = "OPENAI_API_KEY", system_prompt: str = "",
        temperature: float = 0.0, max_tokens: int = 1024, deadline_s: float = 60.0,
    ) -> None:  # fmt: skip
        self._url = url
        self._model = model
        self._key_var = key_var
        self._system_prompt = system_prompt
        self._sampling = Sampling(max_tokens, temperature)
        self._deadline_s = deadline_s
        self._client: ChatClient | None = None

    async def ask(self, prompt: str) -> str:
        """What the model answers. EngineError says why it does not."""
        if self._client is None:
            key = os.environ.get(self._key_var, "")
            self._client = ChatClient(self._url, self._model, key, deadline_s=self._deadline_s)
        system = [Message("system", self._system_prompt)] * bool(self._system_prompt)
        drawn = await self._client.complete([*system, Message("user", prompt)], self._sampling)
        return drawn.content

    async def grade(self, prompt: str) -> float:
        """The last number in the model's answer; EngineError if there is none."""
        answer = await self.ask(prompt)
        numbers = _NUMBER.findall(answer)
        if not numbers or not math.isfinite(float(numbers[-1])):
            raise EngineError(f"the judge at {self._url} gave no number: {answer[:200]!r}")
        return float(numbers[-1])
