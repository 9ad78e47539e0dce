"""Environments whose code refuses to end when it is cancelled, each in its own way."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import rollway as rw
from rollway.records.task import CalledFunction, ToolCall

FOREVER_S = 10_000.0


async def swallow() -> None:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(FOREVER_S)  # refuses


async def wait_in_finally() -> None:
    try:
        await asyncio.sleep(FOREVER_S)
    finally:
        await asyncio.Event().wait()  # refuses


class Shielded:
    """Sleeps on, whoever cancels it."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(FOREVER_S))
        while not inner.done():
            try:
                await asyncio.shield(inner)  # refuses
            except asyncio.CancelledError:
                continue


class StaysOpen(rw.Toolset):
    """Closes for all rollouts but those of the task that it is opened for."""

    def __init__(self, is_bad: bool) -> None:
        self._is_bad = is_bad

    async def __aexit__(self, *_: object) -> None:
        if self._is_bad:
            await swallow()

    @rw.tool
    async def wait(self) -> str:
        """Wait for a while."""
        await swallow()
        return ""


KINDS = (
    "swallows", "finally", "shields", "aexit", "tool", "update", "reward", "child", "background",
    "speaks_on",
)  # fmt: skip
"""What the tasks of `Refusing` do. All other tasks are good."""


class Refusing(rw.Environment):
    def tasks(self) -> Iterator[rw.Task]:
        yield from (rw.Task(id=str(n), prompt=f"{n}?", answer=str(n + 1)) for n in range(100))

    def kind(self, task: rw.Task) -> str:
        return KINDS[int(task.id)] if int(task.id) < len(KINDS) else "good"

    def tools(self, task: rw.Task) -> list[rw.Toolset]:
        return [StaysOpen(self.kind(task) == "aexit")]

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        match self.kind(task):
            case "swallows":
                await swallow()
            case "finally":
                await wait_in_finally()
            case "shields":
                async with Shielded():
                    pass
            case "tool":
                call = ToolCall("call_1", CalledFunction("wait", "{}"))
                await chat._toolbox.answer([call], [])
            case "child":
                await asyncio.gather(chat.child("5?", tools=chat.tools), swallow())
            case "background":
                self.left = asyncio.ensure_future(swallow())
            case "speaks_on":
                while True:
                    with suppress(asyncio.CancelledError):
                        await chat.say(task.prompt)
                        await asyncio.sleep(0.05)
            case "good":
                await asyncio.sleep(3)

    @rw.update
    async def settle_down(self, task: rw.Task, chat: rw.Chat) -> None:
        if self.kind(task) == "update":
            await swallow()

    @rw.reward
    async def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        if self.kind(task) == "reward":
            await wait_in_finally()
        return 1.0


class RefusingGroup(Refusing):
    needs_whole_groups = True

    def kind(self, task: rw.Task) -> str:
        return "good"

    @rw.group_reward
    async def compared(self, task: rw.Task, rollouts: list[rw.Rollout]) -> list[float]:
        if task.id == "1":
            await swallow()
        return [1.0] * len(rollouts)


def load_environment(kind: str) -> rw.Environment:
    env: rw.Environment = globals()[kind]()
    return env
