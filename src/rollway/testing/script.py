"""Scripted policies: the conversation is read back from a prompt's ids, and a function answers it."""

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct

from ..inference.rendering.tokenizer import Tokenizer
from ..records.task import Message

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"(?:\n\n)?# Tools\n.*<tools>\n(.*)\n</tools>.*", re.DOTALL)
_NO_THOUGHTS = "<think>\n\n</think>\n\n"


class PolicyPrompt(Struct, frozen=True):
    """A conversation up to the point where the policy replies next.

    Results of tools have the role `tool`. Earlier replies of the policy are here as it drew them.
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    """Names of the tools that the policy may call."""

    @property
    def last_text(self) -> str:
        """The text of the last message: the user's, or a tool's result."""
        return self.messages[-1].content

    @property
    def first_text(self) -> str:
        """The text of the user's first message: the task's prompt, or a child's."""
        texts = (message.content for message in self.messages if message.role == "user")
        return next(texts, "")

    @property
    def results(self) -> tuple[str, ...]:
        """The results of tools so far."""
        return tuple(message.content for message in self.messages if message.role == "tool")


Answer = Callable[[PolicyPrompt], str | Awaitable[str]]
"""The policy: a plain or async function of the conversation. Requests may reach it in any order."""


def call(name: str, /, **arguments: Any) -> str:
    """Write a tool call as the policy does. Several in one reply: `call(…) + call(…)`."""
    written = msgspec.json.encode({"name": name, "arguments": arguments}).decode()
    return f"<tool_call>\n{written}\n</tool_call>"


def read_prompt(text: str) -> PolicyPrompt:
    """Read the conversation from a prompt that the qwen3 renderer wrote."""
    messages: list[Message] = []
    tools: tuple[str, ...] = ()
    for role, content in _MESSAGE.findall(text):
        if role == "system" and (found := _TOOLS.search(content)):
            tools = tuple(_name(line) for line in found[1].splitlines())
            content = content[: found.start()]
        results = _RESULT.findall(content) if role == "user" else []
        if results:
            messages += [Message("tool", result) for result in results]
        elif role != "system" or content:
            messages.append(Message(role, content.removeprefix(_NO_THOUGHTS)))
    return PolicyPrompt(tuple(messages), tools)


def _name(schema: str) -> str:
    name: str = msgspec.json.decode(schema)["function"]["name"]
    return name


class ScriptedReply(Struct, frozen=True):
    """A scripted reply as an engine returns it."""

    token_ids: list[int]
    finish_reason: str


class Script:
    """Makes a policy over token ids from a policy over text."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer) -> None:
        self._tokenizer = tokenizer
        self.answer = answer

    async def draw(self, prompt_ids: list[int], max_tokens: int, stop_id: int) -> ScriptedReply:
        prompt = read_prompt(self._tokenizer.decode(prompt_ids))
        answer = self.answer(prompt)
        text = await answer if inspect.isawaitable(answer) else answer
        if not isinstance(text, str):
            raise TypeError(f"the answer to {prompt.last_text!r} is {text!r}, not a string")
        ids = [*self._tokenizer.encode(text), stop_id]
        if len(ids) > max_tokens:
            return ScriptedReply(ids[:max_tokens], "length")
        return ScriptedReply(ids, "stop")
