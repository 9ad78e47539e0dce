"""`Chat` for plain (not async) code, which runs in another process than the worker.

It has the same methods without `await`. Each of them asks the worker, where the real chat is, and waits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from ..records.task import Message
from .rollout import Reply
from .toolbox import not_open


class ChatState(Struct, frozen=True):
    """The content of a chat, as it travels between the worker and plain code."""

    messages: tuple[Message, ...]
    replies: tuple[Reply, ...]
    info: dict[str, Any]
    tools: tuple[str, ...]
    tokens_left: int | None = None


class PlainCall(Struct, frozen=True):
    """A method of the real chat to call, and the chat's content as plain code has left it."""

    method: str
    args: tuple[Any, ...]
    state: ChatState


class EndPlainCode(BaseException):
    """The worker wants plain code to end. Not an Exception, so that user code does not catch it."""


AskWorker = Callable[[PlainCall], ChatState | None]
"""Sends a call to the worker and returns the chat after it; None tells plain code to end."""


class PlainChat:
    """The conversation of a rollout. `tools` holds the names of the open toolsets."""

    def __init__(self, ask: AskWorker, state: ChatState) -> None:
        self._ask = ask
        self._take(state)

    def _take(self, state: ChatState) -> None:
        self.messages = list(state.messages)
        self.replies = list(state.replies)
        self.info = state.info
        self.tools = state.tools
        self.tokens_left = state.tokens_left

    @property
    def state(self) -> ChatState:
        messages, replies = tuple(self.messages), tuple(self.replies)
        return ChatState(messages, replies, self.info, self.tools, self.tokens_left)

    @property
    def last_text(self) -> str:
        return self.replies[-1].text if self.replies else ""

    def say(self, content: str) -> Reply:
        if not isinstance(content, str):
            raise TypeError(f"chat.say takes a string, not {type(content).__name__}")
        return self._turns("say", content)

    def go_on(self) -> Reply:
        return self._turns("go_on")

    def act(self, content: str) -> Reply:
        return self._turns("act", content)

    def call_tools(self) -> list[Message]:
        before = len(self.messages)
        self._call("call_tools")
        return self.messages[before:]

    def child(
        self, prompt: str, *, tools: Sequence[str] = (), system_prompt: str = ""
    ) -> "PlainChat":
        """Hold another conversation with the same policy; `tools` are names out of `chat.tools`."""
        if isinstance(tools, str):
            raise TypeError(f"chat.child takes a list of names as tools, not {tools!r}")
        for name in tools:
            if name not in self.tools:
                raise not_open(name)
        state = self._send("child", prompt, tuple(tools), system_prompt)
        return PlainChat(_refuse, state)

    def _turns(self, method: str, *args: Any) -> Reply:
        self._call(method, *args)
        return self.replies[-1]

    def _call(self, method: str, *args: Any) -> None:
        self._take(self._send(method, *args))

    def _send(self, method: str, *args: Any) -> ChatState:
        state = self._ask(PlainCall(method, args, self.state))
        if state is None:
            raise EndPlainCode
        return state


def _refuse(call: PlainCall) -> None:
    raise RuntimeError(
        "the conversation of a child is over when child() returns; start another child"
    )
