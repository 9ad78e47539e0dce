"""A model that judges replies, for rewards that need an opinion."""

import math
import os
import re
from typing import Any

from ...config.credentials import hide_credentials
from ...errors import EngineError
from ...records.task import Message
from ...records.turn import Sampling
from .client import ChatClient

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Judge:
    """Asks a model at an OpenAI-compatible endpoint. Create it in the environment's `__init__` and await
    it in an async reward. The key is read from the environment variable `key_var`. `sampling` may set
    `temperature` (0.0 if not given), `max_tokens` (1024) and `top_p` (1.0)."""

    def __init__(
        self, url: str, model: str, *, key_var: str = "OPENAI_API_KEY", system_prompt: str = "",
        deadline_s: float = 60.0, **sampling: float,
    ) -> None:  # fmt: skip
        self._url = url
        self._model = model
        self._key_var = key_var
        self._system_prompt = system_prompt
        options: dict[str, Any] = {"max_tokens": 1024, "temperature": 0.0, **sampling}
        self._sampling = Sampling(**options)
        self._deadline_s = deadline_s
        self._client: ChatClient | None = None

    async def ask(self, prompt: str) -> str:
        """Return the model's answer, or raise EngineError."""
        if self._client is None:
            key = os.environ.get(self._key_var, "")
            self._client = ChatClient(
                self._url, self._model, key, deadline_s=self._deadline_s
            )
        messages = [Message("user", prompt)]
        if self._system_prompt:
            messages.insert(0, Message("system", self._system_prompt))
        return (await self._client.complete(messages, self._sampling)).content

    async def grade(self, prompt: str) -> float:
        """Return the last number in the model's answer, or raise EngineError if it has none."""
        answer = await self.ask(prompt)
        numbers = [float(text) for text in _NUMBER.findall(answer)]
        if not numbers or not math.isfinite(numbers[-1]):
            url = hide_credentials(self._url)
            raise EngineError(f"the judge at {url} gave no number: {answer[:200]!r}")
        return numbers[-1]
