"""The live tools of a conversation: finds, calls and times them. Who opened them closes them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from ..errors import LaneError, LaneRaised, ToolFailed
from ..records.task import Message, ToolCall
from .background_tasks import unowned
from .tools import Toolset, ToolSpec, as_text, tool_specs

CallPlain = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""Runs a plain (not async) tool by name, somewhere it can do no harm."""
Within = Callable[[Literal["tool"]], AbstractContextManager[None]]
"""Notes where the rollout is for the length of a block."""


class Toolbox:
    """Toolsets that are open, by the names of their tools."""

    def __init__(
        self, toolsets: Sequence[Toolset], call_plain: CallPlain, deadline_s: float,
        within: Within = lambda phase: nullcontext(),
    ) -> None:  # fmt: skip
        self.toolsets = tuple(toolsets)
        self._call_plain = call_plain
        self._deadline_s = deadline_s
        self._within = within
        self._tools: dict[str, tuple[Toolset, ToolSpec]] = {}
        for toolset in self.toolsets:
            for spec in tool_specs(type(toolset)):
                if spec.name in self._tools:
                    raise ValueError(f"two tools are called '{spec.name}'")
                self._tools[spec.name] = toolset, spec
        self.schemas: tuple[dict[str, Any], ...] = tuple(spec.schema for _, spec in self._tools.values())

    def only(self, toolsets: Sequence[Toolset]) -> "Toolbox":
        """The same live tools, or some of them, for a child to borrow."""
        strange = [type(one).__name__ for one in toolsets if one not in self.toolsets]
        if strange:
            raise ValueError(f"{strange[0]} is not open in this chat: borrow from chat.tools")
        return Toolbox(toolsets, self._call_plain, self._deadline_s, self._within)

    async def answer(self, calls: Sequence[ToolCall], malformed: Sequence[str]) -> list[Message]:
        """Run all calls at the same time; their results, in the order they were asked for."""
        with self._within("tool"):
            results = await _all_of([self._call(one) for one in calls])
        answers = [
            Message("tool", text, tool_call_id=call.id, name=call.function.name)
            for call, text in zip(calls, results, strict=True)
        ]
        unread = [Message("tool", f"error: this is no tool call: {raw}") for raw in malformed]
        return answers + unread

    async def _call(self, call: ToolCall) -> str:
        name = call.function.name
        if name not in self._tools:
            return f"error: there is no tool '{name}'; there are: {', '.join(self._tools) or 'none'}"
        toolset, spec = self._tools[name]
        try:
            arguments = spec.read(call.function.arguments)
        except ValueError as error:
            return f"error: {error}"
        try:
            return as_text(await self._run(toolset, spec, arguments))
        except Exception as error:  # whatever the tool raises
            if toolset.errors == "fail":
                raise ToolFailed(f"tool {name}: {_said(error)}") from error
            return f"error: {_said(error)}"

    async def _run(self, toolset: Toolset, spec: ToolSpec, arguments: dict[str, Any]) -> Any:
        if not spec.is_async:
            return await self._call_plain(spec.name, arguments)
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                with unowned():
                    return await getattr(toolset, spec.name)(**arguments)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(f"it took longer than {self._deadline_s:g} s") from None


def _said(error: Exception) -> str:
    """What the policy is told: the error, not where in our machinery it passed by."""
    if isinstance(error, LaneRaised | LaneError | TimeoutError):
        return str(error)
    return f"{type(error).__name__}: {error}"


async def _all_of(calls: Sequence[Awaitable[str]]) -> list[str]:
    """All results; the first failure cancels the rest and is raised as it is."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_awaited(one)) for one in calls]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [one.result() for one in running]


async def _awaited(call: Awaitable[str]) -> str:
    return await call
