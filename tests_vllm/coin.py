"""An environment that any model can be trained on, also one with random weights: the reward depends on
the reply's letters, so that the rollouts of a group differ."""

import zlib

import rollway as rw


class Coin(rw.Environment):
    """Answer `turns` times. `padding` letters are added to each question, to fill the context."""

    def __init__(self, turns: int = 1, padding: int = 0) -> None:
        self.turns = self.max_turns = turns
        self.padding = "x" * padding

    def tasks(self) -> list[rw.Task]:
        return [rw.Task(str(n), prompt=f"{n}{self.padding}") for n in range(200)]

    async def user(self, task: rw.Task, chat: rw.Chat) -> str | None:
        return f"again{self.padding}"

    @rw.reward
    def coin(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(zlib.crc32(rollout.last_text.encode()) % 2)


load_environment = Coin
