"""The conversation an environment holds with the policy."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from ..records.task import Message
from .rollout import Reply
from .toolbox import Toolbox
from .tools import Toolset

MaybeStop = Callable[["Chat"], Awaitable[str]]
"""The name of the first stop condition that holds, or an empty string."""


class Stopped(Exception):
    """A stop condition or a limit ended the rollout; not an error. `name` says which."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def stop_in(error: Exception) -> str:
    """The name of the stop that an exception stands for, also where it came through a task group with
    others of its kind; empty for any other exception."""
    if isinstance(error, Stopped):
        return error.name
    if isinstance(error, ExceptionGroup):
        names = [stop_in(one) for one in error.exceptions]
        return names[0] if all(names) else ""
    return ""


class Speaker(Protocol):
    """Whoever answers: one dialogue with the engine."""

    async def generate(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> Reply: ...

    def child(self) -> "Speaker":
        """Another dialogue; its rows go where this one's go."""


class Limits(Protocol):
    """How far a rollout may go, children included."""

    def count(self, reply: Reply) -> None: ...

    def reached(self) -> str:
        """The name of a limit that is reached, or an empty string."""


class Chat:
    """One conversation of a rollout. Every turn of the policy is recorded token by token.

    `messages` may be edited: what was sampled before stays in a row of its own, and the next turn
    begins a new one. `info` is the environment's notebook for this rollout: JSON-like values that
    rewards find in `rollout.info`.
    """

    def __init__(
        self, speaker: Speaker, toolbox: Toolbox, limits: Limits, *, system_prompt: str = "",
        info: dict[str, Any] | None = None, maybe_stop: MaybeStop | None = None,
    ) -> None:  # fmt: skip
        self._speaker = speaker
        self._toolbox = toolbox
        self._limits = limits
        self._maybe_stop = maybe_stop
        self.messages: list[Message] = []
        self.replies: list[Reply] = []
        self.info: dict[str, Any] = {} if info is None else info
        if system_prompt:
            self.messages.append(Message("system", system_prompt))

    @property
    def tools(self) -> tuple[Toolset, ...]:
        """The toolsets that are open in this conversation, for `child` to borrow."""
        return self._toolbox.toolsets

    @property
    def last_text(self) -> str:
        """The text of the policy's last reply."""
        return self.replies[-1].text if self.replies else ""

    async def say(self, content: str) -> Reply:
        """Say something as the user and return the policy's answer: one turn."""
        if not isinstance(content, str):
            raise TypeError(f"chat.say takes a string, not {type(content).__name__}")
        await self._stop_if_due()
        self.messages.append(Message("user", content))
        return await self._turn()

    async def go_on(self) -> Reply:
        """Let the policy speak to `messages` as they are: after tools answered, or after an edit."""
        await self._stop_if_due()
        return await self._turn()

    async def act(self, content: str) -> Reply:
        """Say something and run the tools that the policy asks for, until it asks for none."""
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
        """A conversation of its own with the same policy: acts on `prompt` and returns the whole chat.

        `tools` are borrowed from this chat (`chat.tools`): they stay open, and children that run at the
        same time share them. Rows of children of the rollout and of updates join the rollout, those of
        children of rewards do not.
        """
        child = Chat(
            self._speaker.child(), self._toolbox.only(tools), self._limits, system_prompt=system_prompt
        )
        await child.act(prompt)
        return child

    async def _turn(self) -> Reply:
        reply = await self._speaker.generate(self.messages, self._toolbox.schemas)
        self._limits.count(reply)
        self.messages.append(reply.message)
        self.replies.append(reply)
        return reply

    async def _stop_if_due(self) -> None:
        """A condition of the environment's says more than a limit, so it is asked first."""
        name = ""
        if self._maybe_stop is not None and self.replies:
            name = await self._maybe_stop(self)
        if name := name or self._limits.reached():
            raise Stopped(name)
