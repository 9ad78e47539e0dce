"""`Chat` for plain (not async) code, which runs in a process of its own.

The same methods without `await`. Each one asks the worker, where the real chat is, and waits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from ..records.task import Message
from .rollout import Reply


class ChatState(Struct, frozen=True):
    """What travels between the two sides of a chat."""

    messages: tuple[Message, ...]
    replies: tuple[Reply, ...]
    info: dict[str, Any]
    tools: tuple[str, ...]


class PlainCall(Struct, frozen=True):
    """A method of the real chat to call, and what plain code has changed since the last time."""

    method: str
    args: tuple[Any, ...]
    state: ChatState


class EndPlainCode(BaseException):
    """The worker wants plain code to end here. Not an Exception, so that no handler of it stays."""


AskWorker = Callable[[PlainCall], ChatState | None]
"""None: end here."""


class PlainChat:
    """A rollout's conversation. `tools` are the names of the open toolsets."""

    def __init__(self, ask: AskWorker, state: ChatState) -> None:
        self._ask = ask
        self._take(state)

    def _take(self, state: ChatState) -> None:
        self.messages = list(state.messages)
        self.replies = list(state.replies)
        self.info = state.info
        self.tools = state.tools

    @property
    def state(self) -> ChatState:
        return ChatState(tuple(self.messages), tuple(self.replies), self.info, self.tools)

    @property
    def reply(self) -> str:
        """The policy's last words."""
        return self.replies[-1].text if self.replies else ""

    def say(self, content: str) -> Reply:
        """Say something as the user and return the policy's answer: one turn."""
        if not isinstance(content, str):
            raise TypeError(f"chat.say takes a string, not {type(content).__name__}")
        return self._turns("say", content)

    def go_on(self) -> Reply:
        """Let the policy speak to `messages` as they are."""
        return self._turns("go_on")

    def act(self, content: str) -> Reply:
        """Say something and run the tools that the policy asks for, until it asks for none."""
        return self._turns("act", content)

    def call_tools(self) -> list[Message]:
        """Run the calls of the last reply, and add their results to `messages`."""
        before = len(self.messages)
        self._call("call_tools")
        return self.messages[before:]

    def child(self, prompt: str, *, tools: Sequence[str] = (), system_prompt: str = "") -> "PlainChat":
        """A conversation of its own with the same policy, over; `tools` are names from `chat.tools`."""
        answer = self._ask(PlainCall("child", (prompt, tuple(tools), system_prompt), self.state))
        if answer is None:
            raise EndPlainCode
        return PlainChat(_no_more, answer)

    def _turns(self, method: str, *args: Any) -> Reply:
        self._call(method, *args)
        return self.replies[-1]

    def _call(self, method: str, *args: Any) -> None:
        answer = self._ask(PlainCall(method, args, self.state))
        if answer is None:
            raise EndPlainCode
        self._take(answer)


def _no_more(asked: PlainCall) -> None:
    raise RuntimeError("a child's conversation is over when plain code gets it")
