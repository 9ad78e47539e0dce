"""An environment that forks, prints, leaks and raises, as some do."""

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import rollway as rw

LEAKED: list[Any] = []


class Panic(BaseException):
    """What libraries in other languages raise."""


def leave_behind() -> None:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)


class Rowdy(rw.Environment):
    def tasks(self) -> Iterator[rw.Task]:
        for n in range(10_000_000):
            yield rw.Task(id=str(n), prompt=f"{n}?", answer=str(n))

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        n = int(task.id)
        if n % 40 == 0:
            leave_behind()
        if n % 5 == 0:
            print("x" * 20_000)
        LEAKED.append(bytearray(2_000))
        reply = await chat.say(task.prompt)
        await chat.say(f"{reply.text}?")
        if n % 23 == 0:
            raise Panic("\udcff is not text")

    @rw.reward
    def length(self, task: rw.Task, rollout: rw.Rollout) -> float:
        n = int(task.id)
        LEAKED.append(open(os.devnull))  # noqa: SIM115
        if n % 31 == 0:
            raise ValueError("broken \udcff")
        if n % 301 == 0:
            os._exit(3)
        return len(rollout.last_text) / 8


def load_environment() -> rw.Environment:
    return Rowdy()
