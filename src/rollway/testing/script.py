"""What a scripted policy is asked, read back from the prompt's ids, and what it answers."""

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct

from ..inference.rendering.tokenizer import Tokenizer
from ..records.task import Message

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"(?:\n\n)?# Tools\n.*<tools>\n(.*)\n</tools>.*", re.DOTALL)
_NO_THOUGHTS = "<think>\n\n</think>\n\n"


class PolicyPrompt(Struct, frozen=True):
    """A conversation up to where the policy speaks next.

    Results of tools have the role `tool`; what the policy said before is there as it drew it.
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    """Names of the tools it may call."""

    @property
    def said(self) -> str:
        """What was said last: by the user, or by a tool."""
        return self.messages[-1].content

    @property
    def first(self) -> str:
        """The user's first words: the task's prompt, or a child's."""
        return next((one.content for one in self.messages if one.role == "user"), "")

    @property
    def results(self) -> tuple[str, ...]:
        """What tools have answered so far."""
        return tuple(one.content for one in self.messages if one.role == "tool")


Answer = Callable[[PolicyPrompt], str | Awaitable[str]]
"""The policy: a function of what is asked, plain or async, so that any interleaving gives the same."""


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the policy writes it. Several in one reply: `call(…) + call(…)`."""
    written = msgspec.json.encode({"name": name, "arguments": arguments}).decode()
    return f"<tool_call>\n{written}\n</tool_call>"


def read_prompt(text: str) -> PolicyPrompt:
    """The conversation in a prompt that the qwen3 renderer wrote."""
    messages: list[Message] = []
    tools: tuple[str, ...] = ()
    for role, content in _TURN.findall(text):
        if role == "system" and (found := _TOOLS.search(content)):
            tools = tuple(_name(line) for line in found[1].splitlines())
            content = content[: found.start()]
        results = _RESULT.findall(content) if role == "user" else []
        if results:
            messages += [Message("tool", one) for one in results]
        elif role != "system" or content:
            messages.append(Message(role, content.removeprefix(_NO_THOUGHTS)))
    return PolicyPrompt(tuple(messages), tools)


def _name(schema: str) -> str:
    name: str = msgspec.json.decode(schema)["function"]["name"]
    return name


class ScriptedReply(Struct, frozen=True):
    """A scripted reply as an engine gives it."""

    token_ids: list[int]
    finish_reason: str


class Script:
    """Turns an answer into a policy over token ids."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer) -> None:
        self._tokenizer = tokenizer
        self.answer = answer

    async def draw(self, prompt_ids: list[int], max_tokens: int, stop_id: int) -> ScriptedReply:
        asked = read_prompt(self._tokenizer.decode(prompt_ids))
        said = self.answer(asked)
        text = await said if inspect.isawaitable(said) else said
        if not isinstance(text, str):
            raise TypeError(f"the answer to {asked.said!r} is {text!r}, not a string")
        ids = [*self._tokenizer.encode(text), stop_id]
        if len(ids) > max_tokens:
            return ScriptedReply(ids[:max_tokens], "length")
        return ScriptedReply(ids, "stop")
