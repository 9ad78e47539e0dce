"""The open tools of a conversation: finds a tool by name, calls it, and ends it at its deadline.

A toolbox opens and closes nothing; the code that opened its toolsets closes them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from ..errors import LaneError, ToolFailed
from ..loop.bounded_code import must_end_within
from ..records.task import Message, ToolCall
from ..records.text import sendable
from .background_tasks import outside_rollouts
from .tools import Toolset, ToolSpec, as_text, tool_specs

CallPlain = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""Calls a plain (not async) tool by name, in a process or thread where it cannot hold up the loop."""
Within = Callable[[Literal["tool"]], AbstractContextManager[None]]
"""Marks the phase that the rollout is in, for the length of a block."""


class Toolbox:
    """Open toolsets, and their tools by name. A result that begins with `error:` tells the policy what
    went wrong."""

    def __init__(
        self,
        toolsets: Sequence[Toolset],
        call_plain: CallPlain,
        deadline_s: float,
        within: Within = lambda phase: nullcontext(),
    ) -> None:
        self.toolsets = tuple(toolsets)
        self._call_plain = call_plain
        self._deadline_s = deadline_s
        self._within = within
        self._tools: dict[str, tuple[Toolset, ToolSpec]] = {}
        for toolset in self.toolsets:
            for spec in tool_specs(type(toolset)):
                if spec.name in self._tools:
                    raise ValueError(
                        f"two tools are called '{spec.name}'; rename one of them"
                    )
                self._tools[spec.name] = toolset, spec
        self.schemas = tuple(spec.schema for _, spec in self._tools.values())

    def only(self, toolsets: Sequence[Toolset]) -> "Toolbox":
        """Return a toolbox with some of these open toolsets, for a child to borrow."""
        for toolset in toolsets:
            if toolset not in self.toolsets:
                raise not_open(type(toolset).__name__)
        return Toolbox(toolsets, self._call_plain, self._deadline_s, self._within)

    async def answer(
        self, calls: Sequence[ToolCall], malformed: Sequence[str]
    ) -> list[Message]:
        """Run all calls at the same time and return their results, in the order of the calls."""
        with self._within("tool"):
            results = await _run_all([self._call(call) for call in calls])
        answers = [
            Message("tool", sendable(text), tool_call_id=call.id, name=call.function.name)
            for call, text in zip(calls, results, strict=True)
        ]
        hint = "this tool call cannot be read; write it again in the right format"
        return answers + [Message("tool", f"error: {hint}: {text}") for text in malformed]

    async def _call(self, call: ToolCall) -> str:
        name = call.function.name
        if name not in self._tools:
            names = ", ".join(self._tools)
            hint = f"the tools are: {names}" if names else "you have no tools"
            return f"error: no tool is called '{name}'; {hint}"
        toolset, spec = self._tools[name]
        try:
            arguments = spec.read(call.function.arguments)
        except ValueError as error:
            return f"error: {error}"
        try:
            return as_text(await self._run(toolset, spec, arguments))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the tool may raise anything
            text = _describe(error)
            if toolset.errors == "fail":
                raise ToolFailed(f"tool {name}: {text}") from error
            return f"error: {text}"

    async def _run(self, toolset: Toolset, spec: ToolSpec, arguments: dict[str, Any]) -> Any:
        if not spec.is_async:
            return await self._call_plain(spec.name, arguments)
        try:
            with must_end_within(self._deadline_s, f"tool `{spec.name}`"):
                async with asyncio.timeout(self._deadline_s) as deadline:
                    with outside_rollouts():
                        return await getattr(toolset, spec.name)(**arguments)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"{spec.name} took longer than {self._deadline_s:g} s"
            ) from None


def not_open(name: str) -> ValueError:
    return ValueError(f"{name} is not open in this chat: borrow from chat.tools")


def _describe(error: BaseException) -> str:
    """Return the error in one line. Errors of a lane already name the exception that the tool raised."""
    if isinstance(error, LaneError | TimeoutError):
        return str(error)
    return f"{type(error).__name__}: {error}"


async def _run_all(calls: Sequence[Coroutine[Any, Any, str]]) -> list[str]:
    """Return all results. The first failure cancels the other calls and is raised without a group."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]
