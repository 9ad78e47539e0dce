"""reverse-text: say a random word backwards. Single turn, exact-match reward."""

import random
import string

import rollway as rw

from ..drawn_tasks import DrawnTasks


class ReverseText(DrawnTasks):
    """Words of `min_length` to `max_length` random letters."""

    def __init__(self, min_length: int = 3, max_length: int = 7, num_eval: int = 128) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(
                f"need 1 <= min_length <= max_length, got {min_length}, {max_length}"
            )
        self.lengths = (min_length, max_length)
        self.num_eval = num_eval

    def draw(self, task_id: str, rng: random.Random) -> rw.Task:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*self.lengths)))
        return rw.Task(task_id, prompt=f"Reverse: {word}", answer=word[::-1])

    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.last_text.strip() == task.answer)

    @rw.metric
    def letters_in_place(self, task: rw.Task, rollout: rw.Rollout) -> float:
        pairs = zip(rollout.last_text.strip(), task.answer, strict=False)
        return float(sum(a == b for a, b in pairs) / len(task.answer))


load_environment = ReverseText
