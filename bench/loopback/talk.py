"""An environment that says the same thing for as many turns as it is told."""

from collections.abc import Iterator

import rollway as rw


class Talk(rw.Environment):
    def __init__(self, turns: int) -> None:
        self.turns = turns

    def tasks(self) -> Iterator[rw.Task]:
        yield rw.Task(id="0", prompt="go on")

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        for _ in range(self.turns):
            await chat.say(task.prompt)

    @rw.reward
    async def one(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return 1.0
