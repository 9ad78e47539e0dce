"""reverse-text: say a random word backwards. Single turn, exact-match reward."""

import itertools
import random
import string
from collections.abc import Iterator

import rollway as rw

from ..splits import EVAL_SEED, evaluation, training


class ReverseText(rw.Environment):
    """Words of `min_length` to `max_length` random letters."""

    def __init__(self, min_length: int = 3, max_length: int = 7, num_eval: int = 128) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(f"need 1 <= min_length <= max_length, got {min_length}, {max_length}")
        self.lengths = (min_length, max_length)
        self.num_eval = num_eval

    def tasks(self) -> Iterator[rw.Task]:
        return training(self.drawn(self.seed))

    def eval_tasks(self) -> Iterator[rw.Task]:
        return evaluation(self.drawn(EVAL_SEED), self.num_eval)

    def drawn(self, seed: int) -> Iterator[rw.Task]:
        rng = random.Random(seed)
        for index in itertools.count():
            word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*self.lengths)))
            yield rw.Task(id=str(index), prompt=f"Reverse: {word}", answer=word[::-1])

    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.reply.strip() == task.answer)

    @rw.metric
    def letters_in_place(self, task: rw.Task, rollout: rw.Rollout) -> float:
        pairs = zip(rollout.reply.strip(), task.answer, strict=False)
        return float(sum(a == b for a, b in pairs) / len(task.answer))


def load_environment(min_length: int = 3, max_length: int = 7, num_eval: int = 128) -> ReverseText:
    return ReverseText(min_length, max_length, num_eval)
