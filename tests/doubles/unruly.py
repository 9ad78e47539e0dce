"""Environments in which task 1, and only that, does something it should not."""

import asyncio
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import rollway as rw

BAD = "1"


class Base(rw.Environment):
    def tasks(self) -> Iterator[rw.Task]:
        yield from (rw.Task(id=str(n), prompt=f"{n}?", answer=str(n + 1)) for n in range(100))

    @rw.reward
    async def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.last_text == task.answer)


class HoldsLoop(Base):
    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        if task.id == BAD:
            hold_on()
        await asyncio.sleep(0.5)


def hold_on() -> None:
    time.sleep(60)


class HoldsInChild(Base):
    """In a task of the rollout's, not in the rollout itself."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await asyncio.gather(chat.say(task.prompt), self.other(task))

    async def other(self, task: rw.Task) -> None:
        await asyncio.sleep(0.2)
        if task.id == BAD:
            hold_on()


class Exits(Base):
    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        if task.id == BAD:
            os._exit(9)
        await asyncio.sleep(0.3)


class Panic(BaseException):
    """What some libraries raise: pytest.fail, gevent.Timeout, a panic of Rust code."""


class Misbehaves(Base):
    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        if task.id == BAD:
            await self.misbehave(chat)
        await asyncio.sleep(0.3)

    async def misbehave(self, chat: rw.Chat) -> None: ...


class Quits(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        sys.exit("enough")


class QuitsInTask(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        await asyncio.ensure_future(self.quit())

    async def quit(self) -> None:
        sys.exit("enough")


class Panics(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        raise Panic("of a library")


class Surrogate(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        raise ValueError("caf\udce9")


class SpeaksSurrogate(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        await chat.say("caf\udce9")


class LeavesSurrogate(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        chat.messages.append(rw.Message("user", "caf\udce9"))


class HugeNumber(Base):
    @rw.metric
    async def huge(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return 10**400 if task.id == BAD else 1.0


class StopsLoop(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        asyncio.get_running_loop().stop()


class ClosesFiles(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        os.closerange(3, 256)


class WritesToAllFiles(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        write_to_all_files()
        await asyncio.sleep(5)


def write_to_all_files() -> None:
    for fd in range(3, 256):
        with suppress(OSError):
            os.write(fd, b"garbage" * 10)


class OpensNoMoreFiles(Misbehaves):
    async def misbehave(self, chat: rw.Chat) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


RAISED: dict[str, BaseException] = {
    "1": Panic("of a library"),
    "2": GeneratorExit("closed"),
    "3": SystemExit("enough"),
    "4": KeyboardInterrupt("stop"),
}
"""What rewards of these tasks raise: on their own from "1" on, with their group from "1g" on."""
WRITES = "5"


class RaisingScorers(Base):
    """Async rewards that raise what is not an Exception, and a plain one that writes to all files."""

    def tasks(self) -> Iterator[rw.Task]:
        raise ValueError("caf\udce9")

    @rw.reward
    async def judged(self, task: rw.Task, rollout: rw.Rollout) -> float:
        if task.id in RAISED:
            raise RAISED[task.id]
        return 1.0

    @rw.group_reward
    async def compared(self, task: rw.Task, rollouts: list[rw.Rollout]) -> list[float]:
        if task.id.endswith("g"):
            raise RAISED[task.id.removesuffix("g")]
        return [1.0 for _ in rollouts]

    @rw.metric
    def measured(self, task: rw.Task, rollout: rw.Rollout) -> float:
        if task.id == WRITES:
            write_to_all_files()
        return float(os.getpid())


class Scorers(Base):
    """Rewards that spin, take all memory, or end their process, by task."""

    @rw.reward
    def judged(self, task: rw.Task, rollout: rw.Rollout) -> float:
        if task.id == "1":
            spin()
        if task.id == "2":
            hoard()
        if task.id == "3":
            os._exit(7)
        return 1.0


def spin() -> None:
    while True:
        pass


def hoard() -> None:
    kept = []
    while True:
        kept.append(bytearray(8 << 20))


class Patient(Base):
    """Sleeps as many seconds as its task's number says."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        await asyncio.sleep(int(task.id))


def load_environment(kind: str) -> rw.Environment:
    if kind == "NeverLoads":
        time.sleep(60)
    env: rw.Environment = globals()[kind]()
    return env
