"""Environments that use everything authors can write."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import rollway as rw


class Asking(rw.Environment):
    """One task; subclasses change how it goes."""

    def tasks(self) -> Iterator[rw.Task]:
        yield rw.Task(id="0", prompt="1?", answer="2")

    def eval_tasks(self) -> Iterator[rw.Task]:
        yield rw.Task(id="eval", prompt="7?", answer="8")

    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.reply == task.answer)


class Sums(rw.Toolset):
    def __init__(self) -> None:
        self.calls: list[int] = []

    @rw.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.calls.append(a + b)
        return a + b

    @rw.tool
    def double(self, a: int) -> int:
        """Twice a number."""
        return 2 * a

    @rw.tool
    def sleep(self) -> None:
        time.sleep(30)


class WithTools(Asking):
    def tools(self, task: rw.Task) -> Sequence[rw.Toolset]:
        return [Sums()]

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.act(task.prompt)
        (sums,) = chat.tools
        assert isinstance(sums, Sums)
        chat.info["calls"] = sums.calls


class PlainCode(WithTools):
    """Written without a single `async`."""

    def rollout(self, task: rw.Task, chat: rw.Chat) -> None:  # type: ignore[override]
        reply = chat.say("1?")
        reply = chat.say(f"{reply.text}?")  # type: ignore[attr-defined]
        child = chat.child("call add 1 2", tools=["Sums"])  # type: ignore[list-item]
        chat.info["child"] = child.reply  # type: ignore[attr-defined]
        chat.info["said"] = reply.text  # type: ignore[attr-defined]

    @rw.update
    def note(self, task: rw.Task, chat: rw.Chat) -> None:
        chat.info["note"] = f"{len(chat.messages)} messages"

    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.info == {"child": "I got 3", "said": "3", "note": "4 messages"})


class PlainStuck(Asking):
    def rollout(self, task: rw.Task, chat: rw.Chat) -> None:  # type: ignore[override]
        chat.say("1?")  # type: ignore[unused-coroutine]
        time.sleep(60)


class PlainRaises(Asking):
    def rollout(self, task: rw.Task, chat: rw.Chat) -> None:  # type: ignore[override]
        raise KeyError("plainly wrong")


class PlainClings(Asking):
    """Goes on when it is told to end, and says so in a file."""

    max_turns = 1

    def rollout(self, task: rw.Task, chat: rw.Chat) -> None:  # type: ignore[override]
        try:
            for _ in range(2):
                chat.say("1?")  # type: ignore[unused-coroutine]
        except BaseException:
            Path(task.info["mark"]).touch()
            time.sleep(60)


class Stops(Asking):
    max_turns = 10

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        reply = await chat.say("1?")
        while True:
            reply = await chat.say(f"{reply.text}?")

    @rw.stop
    def at_four(self, task: rw.Task, chat: rw.Chat) -> bool:
        return chat.last_text == "4"


class Limited(Stops):
    max_turns = 2


class Converses(Asking):
    """The default rollout with a user who asks twice."""

    async def user(self, task: rw.Task, chat: rw.Chat) -> str | None:
        return f"{chat.last_text}?" if len(chat.replies) < 3 else None


class Ranked(Asking):
    """Rewards within a group: the rank of the reply's number."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        for _ in range(chat.info.setdefault("more", 0)):
            await chat.say("1?")

    @rw.group_reward(weight=2.0)
    def rank(self, task: rw.Task, rollouts: list[rw.Rollout]) -> list[float]:
        return [float(index) for index, _ in enumerate(rollouts)]

    @rw.group_reward
    async def size(self, task: rw.Task, rollouts: list[rw.Rollout]) -> list[float]:
        return [len(rollouts)] * len(rollouts)


class BadRanks(Ranked):
    @rw.group_reward
    def rank(self, task: rw.Task, rollouts: list[rw.Rollout]) -> list[float]:
        return [1.0]


class Shared(rw.Toolset):
    """Counts, in the class, how often it was opened and closed."""

    scope = "group"
    opened = closed = 0

    async def __aenter__(self) -> "Shared":
        await asyncio.sleep(0.01)
        type(self).opened += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        type(self).closed += 1

    @rw.tool
    async def look(self) -> str:
        return f"opened {type(self).opened}, closed {type(self).closed}"


class WorkerWide(Shared):
    scope = "worker"
    opened = closed = 0


class SharesTools(Asking):
    needs_whole_groups = True

    def tools(self, task: rw.Task) -> Sequence[rw.Toolset]:
        return [Shared(), WorkerWideBox()]

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say("1?")
        await asyncio.sleep(0.05)


class WorkerWideBox(WorkerWide):
    opened = closed = 0

    @rw.tool
    async def look_wide(self) -> str:
        return "wide"

    look = None  # type: ignore[assignment]


class Forgetful(Asking):
    """Starts conversations that it does not wait for."""

    started: list["asyncio.Task[rw.Chat]"] = []  # noqa: RUF012

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        for _ in range(3):
            self.started.append(asyncio.create_task(chat.child("slow 1?")))
        await chat.say("1?")


class Judged(Asking):
    """A reward that asks the policy itself, with a tool of the rollout."""

    def tools(self, task: rw.Task) -> Sequence[rw.Toolset]:
        return [Sums()]

    @rw.reward
    async def judged(self, task: rw.Task, rollout: rw.Rollout, chat: rw.Chat) -> float:
        child = await chat.child("call add 20 2", tools=chat.tools)
        return float(child.last_text.split()[-1])


def load_environment(kind: str = "Asking") -> rw.Environment:
    env: rw.Environment = globals()[kind]()
    return env
