"""Environments that behave, and some that do not."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import rollway as rw


class Counting(rw.Environment):
    """Endless tasks `n?`; subclasses change one thing."""

    def tasks(self) -> Iterator[rw.Task]:
        n = 0
        while True:
            yield rw.Task(id=str(n), prompt=f"{n}?", answer=str(n))
            n += 1

    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.last_text == task.answer)


class NamesItsLoop(Counting):
    """Its metric is 1 if the worker's loop is uvloop's."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        chat.info["loop"] = type(asyncio.get_running_loop()).__module__

    @rw.metric
    async def is_uvloop(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.info["loop"].startswith("uvloop"))


NUM_CHATTY = 80


class Chatty(Counting):
    """Its transcripts are long, and the policy does not see most of them."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        chat.messages += [rw.Message("user", "many words " * 1000) for _ in range(NUM_CHATTY)]

    @rw.reward
    async def length(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return len(rollout.messages[-1 - NUM_CHATTY].content) / 8


class ThreeTurns(Counting):
    """Counts on for three turns."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        reply = await chat.say(task.prompt)
        for _ in range(2):
            reply = await chat.say(f"{reply.text}?")
        chat.info["last"] = reply.text


class Wordy(Counting):
    """A prompt of many tokens, so that the payload is large."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt + 20_000 * "?")


class RaisingReward(Counting):
    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        raise ValueError("cannot judge")


FAILURES = (
    "raises", "says_nothing", "cancels_itself", "sleeps", "spins", "dies", "cannot_judge", "nan", "none"
)  # fmt: skip
"""What goes wrong with task 0, 1, …"""


class Failing(Counting):
    """Each task fails in its own way: half of them in the rollout, half in the reward."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        how = FAILURES[int(task.id)]
        if how == "raises":
            raise KeyError("no such thing")
        if how == "says_nothing":
            return
        saying = asyncio.ensure_future(chat.say(task.prompt))
        if how == "cancels_itself":
            saying.cancel()
        await saying
        if how == "sleeps":
            await asyncio.sleep(60)

    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        match FAILURES[int(task.id)]:
            case "spins":
                while True:
                    pass
            case "dies":
                os._exit(3)
            case "cannot_judge":
                raise ValueError("cannot judge")
            case "nan":
                return float("nan")
        return 1.0


class AsyncReward(Counting):
    @rw.reward
    async def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        await asyncio.sleep(0)
        return 0.25


class Blocks(Counting):
    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        time.sleep(0.5)  # noqa: ASYNC251


class CountsFrames(Counting):
    """Counts the calls of rollway between the event loop and `rollout`."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        package, num_frames = str(Path(rw.__file__).parent), 0
        frame = sys._getframe().f_back
        while frame is not None and frame.f_code.co_filename.startswith(package):
            num_frames += 1
            frame = frame.f_back
        chat.info["num_frames"] = num_frames
        await chat.say(task.prompt)

    @rw.metric
    def num_frames(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.info["num_frames"])


class KillsWorker(Counting):
    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        if task.id == "1":
            os._exit(9)


class Lengths(Counting):
    """Two turns; a random policy gets rewards of all sizes."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)
        await chat.say("more?")

    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return sum(len(message.content.encode()) for message in rollout.messages) % 7 / 7


class TooLarge(Lengths):
    """Its second task cannot be sent back to its env server."""

    def tasks(self) -> Iterator[rw.Task]:
        for task in super().tasks():
            if task.id == "1":
                task = rw.Task(id=task.id, prompt="?" * (17 << 20))
            yield task

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await chat.say(task.prompt)


class Planted(Lengths):
    """Holds its worker's loop in some rollouts, and its scoring process in some rewards."""

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await super().rollout(task, chat)
        if int(task.id) % 4 == 0:
            time.sleep(0.3)  # noqa: ASYNC251

    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        if int(task.id) % 4 == 1:
            ponder(0.3)
        return sum(len(message.content.encode()) for message in rollout.messages) % 7 / 7


class Ponders(Counting):
    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        ponder(0.3)
        return 1.0


def ponder(seconds: float) -> None:
    time.sleep(seconds)


def load_environment(kind: str = "Counting") -> rw.Environment:
    env: rw.Environment = globals()[kind]()
    return env
