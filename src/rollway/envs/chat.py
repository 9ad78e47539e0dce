"""The conversation an environment holds with the policy."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..records.task import Message
from ..records.text import check_sendable
from .rollout import Reply
from .toolbox import Toolbox
from .tools import Toolset

StopReason = Callable[["Chat"], str]
"""Says why a chat must stop before its next turn: the name of a stop condition or limit, or ""."""


CONTEXT_FULL = "context"
"""The stop of a rollout whose next prompt does not fit the engine's context window."""


class Stopped(Exception):
    """A stop condition or a limit ended the rollout; not an error. `name` says which."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def stop_in(error: Exception) -> str:
    """Return the name of the stop that this error stands for, or "" if it is another error. A group of
    exceptions is a stop only if all its members are."""
    if isinstance(error, Stopped):
        return error.name
    if isinstance(error, ExceptionGroup):
        names = [stop_in(member) for member in error.exceptions]
        return names[0] if all(names) else ""
    return ""


class Speaker(Protocol):
    async def generate(
        self, messages: list[Message], tools: Sequence[dict[str, Any]]
    ) -> Reply:
        """Return the policy's reply to `messages`, and record the turn."""

    @property
    def tokens_left(self) -> int | None:
        """How many tokens the conversation may still grow by, or None if the engine does not say."""

    def child(self) -> "Speaker":
        """Return a speaker for another conversation that is recorded in the same rollout."""

    def aside(self) -> "Speaker":
        """Return a speaker for another conversation that is recorded nowhere."""


def never_stop(chat: "Chat") -> str:
    return ""


class Chat:
    """One conversation of a rollout. Every turn of the policy is recorded token by token.

    `messages` may be edited: the next turn then begins a new row. `info` is the environment's notebook
    for this rollout: JSON-like values that rewards find in `rollout.info`.
    """

    def __init__(
        self,
        speaker: Speaker,
        toolbox: Toolbox,
        stop_reason: StopReason = never_stop,
        *,
        system_prompt: str = "",
        is_child: bool = False,
    ) -> None:
        self._speaker = speaker
        self._toolbox = toolbox
        self._stop_reason = stop_reason
        self.is_child = is_child
        self.messages = [Message("system", system_prompt)] if system_prompt else []
        self.replies: list[Reply] = []
        self.info: dict[str, Any] = {}

    @property
    def tools(self) -> tuple[Toolset, ...]:
        """The toolsets that are open in this conversation, for `child` to borrow."""
        return self._toolbox.toolsets

    @property
    def last_text(self) -> str:
        """The text of the policy's last reply, or "" before the first one."""
        return self.replies[-1].text if self.replies else ""

    @property
    def tokens_left(self) -> int | None:
        """How many tokens new messages and replies may still have, before the engine's context window
        is full. The prompt of a turn that does not fit ends the rollout, with stop `context`. None if
        the engine does not tell its window."""
        return self._speaker.tokens_left

    async def say(self, content: str) -> Reply:
        """Say something as the user and return the policy's reply: one turn."""
        if not isinstance(content, str):
            raise TypeError(f"chat.say takes a string, not {type(content).__name__}")
        check_sendable(content)
        self._stop_if_due()
        self.messages.append(Message("user", content))
        return await self._take_turn()

    async def go_on(self) -> Reply:
        """Let the policy reply to `messages` as they are: after tools answered, or after an edit."""
        self._stop_if_due()
        return await self._take_turn()

    async def act(self, content: str) -> Reply:
        """Say something and run the tools that the policy calls, until a reply calls none."""
        reply = await self.say(content)
        while reply.wants_tools and not reply.truncated:
            await self.call_tools()
            reply = await self.go_on()
        return reply

    async def call_tools(self) -> list[Message]:
        """Run the calls of the last reply at the same time, and add their results to `messages`."""
        if not self.replies:
            return []
        last = self.replies[-1]
        answers = await self._toolbox.answer(last.tool_calls, last.malformed_calls)
        self.messages += answers
        return answers

    async def child(
        self, prompt: str, *, tools: Sequence[Toolset] = (), system_prompt: str = ""
    ) -> "Chat":
        """Hold another conversation with the same policy: act on `prompt` and return the whole chat.

        `tools` are borrowed from this chat (`chat.tools`) and shared by children that run at the same
        time. Rows of children of the rollout and of updates join the rollout, those of rewards do not.
        """
        speaker, toolbox = self._speaker.child(), self._toolbox.only(tools)
        child = Chat(
            speaker, toolbox, self._stop_reason, system_prompt=system_prompt, is_child=True
        )
        await child.act(prompt)
        return child

    def aside(self) -> "Chat":
        """Open a chat with the same tools and notes for rewards: no limits, and recorded nowhere."""
        aside = Chat(self._speaker.aside(), self._toolbox)
        aside.info = dict(self.info)
        return aside

    async def _take_turn(self) -> Reply:
        reply = await self._speaker.generate(self.messages, self._toolbox.schemas)
        self.messages.append(reply.message)
        self.replies.append(reply)
        return reply

    def _stop_if_due(self) -> None:
        if name := self._stop_reason(self):
            raise Stopped(name)
