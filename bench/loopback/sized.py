"""An environment whose rollouts are large, each in the way that its task names."""

from collections.abc import Iterator

import rollway as rw
from rollway.records.task import Message

LARGE = 15_000_000
TEXT = "so it goes " * (LARGE // 11)
TURNS, ROWS = 200, 500


class Sized(rw.Environment):
    def tasks(self) -> Iterator[rw.Task]:
        yield rw.Task(id="0", prompt="go on", answer="one turn")

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        match task.answer:
            case "200 turns":
                for _ in range(TURNS):
                    await chat.say(task.prompt)
            case "500 rows":
                for number in range(ROWS):
                    chat.messages.clear()
                    await chat.say(f"{number} {task.prompt}")
            case "a transcript of 15 MB":
                await chat.say(task.prompt)
                chat.messages.append(Message("user", TEXT))
            case "15 MB of tool output":
                await chat.say(task.prompt)
                chat.messages.append(Message("user", TEXT))
                await chat.go_on()
            case _:
                await chat.say(task.prompt)

    @rw.reward
    async def one(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return 1.0

    @rw.metric
    def length(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(len(rollout.messages))


def load_environment() -> rw.Environment:
    return Sized()
