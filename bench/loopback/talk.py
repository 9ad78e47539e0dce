"""An environment that says as much as it is told for as many turns as its task wants."""

from collections.abc import Iterator

import rollway as rw


class Talk(rw.Environment):
    def __init__(self, turns: int, chars: int = 5) -> None:
        self.turns = turns
        self.text = "go on" * (chars // 5)

    def tasks(self) -> Iterator[rw.Task]:
        number = 0
        while True:
            yield rw.Task(id=str(number), prompt=self.text, answer=str(self.turns))
            number += 1

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        for _ in range(int(task.answer)):
            await chat.say(task.prompt)

    @rw.reward
    async def one(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return 1.0
