"""reverse-text: say a random word backwards. Single turn, endless tasks, exact-match reward."""

import random
import string
from collections.abc import Iterator

import rollway as rw


class ReverseText(rw.Environment):
    """Words of `min_length` to `max_length` random letters."""

    def __init__(self, min_length: int = 3, max_length: int = 7) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(f"need 1 <= min_length <= max_length, got {min_length}, {max_length}")
        self.lengths = (min_length, max_length)

    def tasks(self) -> Iterator[rw.Task]:
        rng = random.Random(self.seed)
        index = 0
        while True:
            word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*self.lengths)))
            yield rw.Task(id=str(index), prompt=f"Reverse: {word}", answer=word[::-1])
            index += 1

    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.reply.strip() == task.answer)

    @rw.metric
    def letters_in_place(self, task: rw.Task, rollout: rw.Rollout) -> float:
        pairs = zip(rollout.reply.strip(), task.answer, strict=False)
        return float(sum(a == b for a, b in pairs) / len(task.answer))


def load_environment(min_length: int = 3, max_length: int = 7) -> ReverseText:
    return ReverseText(min_length, max_length)
