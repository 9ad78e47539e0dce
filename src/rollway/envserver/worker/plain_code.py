"""Runs plain (not async) user code in separate processes, with the chat of its rollout."""

from typing import Any

from ...envs.chat import Chat
from ...envs.in_lane import EnvSpec, call_plain_tool, run_plain
from ...envs.plain_chat import ChatState, PlainCall
from ...errors import LaneError
from ...loop.lanes.lanes import Lane
from ...loop.lanes.server import find_caller
from ...records.task import Task


def run_in_lane(spec: EnvSpec, method: str, task: Task, state: ChatState) -> ChatState:
    return run_plain(spec, method, task, state, find_caller())


class PlainCode:
    """Runs rollouts, updates and tools that are written without `async`."""

    def __init__(self, spec: EnvSpec, lane: Lane, queue_s: float) -> None:
        self._spec = spec
        self._lane = lane
        self._queue_s = queue_s

    async def run(self, method: str, task: Task, chat: Chat, deadline_s: float) -> None:
        """Run a plain `rollout` or update. The real chat answers what it asks for."""
        host = _ChatHost(chat)
        try:
            state = await self._lane.call(
                run_in_lane, self._spec, method, task, _state_of(chat),
                deadline_s=deadline_s, queue_s=deadline_s, replier=host.answer,
            )  # fmt: skip
        except LaneError:
            if host.error is None:
                raise
            raise host.error from None
        if host.error is not None:
            raise host.error
        host.take(state)

    async def call_tool(
        self, task: Task, name: str, arguments: dict[str, Any], deadline_s: float
    ) -> Any:
        return await self._lane.call(
            call_plain_tool, self._spec, task, name, arguments,
            deadline_s=deadline_s, queue_s=self._queue_s,
        )  # fmt: skip


class _ChatHost:
    """The worker's side of a plain chat: calls the methods of the real chat that plain code asks for."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.error: Exception | None = None
        """What ended the conversation. Plain code must end then, and this is raised instead."""

    def take(self, state: ChatState) -> None:
        self._chat.messages[:] = state.messages
        self._chat.info = state.info

    async def answer(self, call: PlainCall) -> ChatState | None:
        self.take(call.state)
        chat = self._chat
        try:
            match call.method, call.args:
                case "say" | "act", (content,):
                    await getattr(chat, call.method)(content)
                case "go_on" | "call_tools", ():
                    await getattr(chat, call.method)()
                case "child", (prompt, names, system_prompt):
                    borrowed = [
                        toolset for toolset in chat.tools if type(toolset).__name__ in names
                    ]
                    child = await chat.child(
                        prompt, tools=borrowed, system_prompt=system_prompt
                    )
                    return _state_of(child)
        except Exception as error:  # of a stop, an engine or a tool: `run` raises it again
            self.error = error
            return None
        return _state_of(chat)


def _state_of(chat: Chat) -> ChatState:
    names = tuple(type(toolset).__name__ for toolset in chat.tools)
    messages, replies = tuple(chat.messages), tuple(chat.replies)
    return ChatState(messages, replies, chat.info, names, chat.tokens_left)
