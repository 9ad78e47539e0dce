"""An environment that sleeps for a moment, then says one thing."""

import asyncio
import random
from collections.abc import Iterator

import rollway as rw


class Nap(rw.Environment):
    def __init__(self, seconds: float, spread: float = 0.0) -> None:
        self.seconds, self.spread = seconds, spread

    def tasks(self) -> Iterator[rw.Task]:
        yield rw.Task(id="0", prompt="go on")

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        await asyncio.sleep(self.seconds + random.uniform(-self.spread, self.spread))
        await chat.say(task.prompt)

    @rw.reward
    async def one(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return 1.0
