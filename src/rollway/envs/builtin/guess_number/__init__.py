"""guess-number: find a number; each guess is answered with higher or lower. Several turns."""

import random

import rollway as rw

from ..drawn_tasks import DrawnTasks, number_in, replies_of

LOWEST = range(1, 901)
"""The lowest number of a range to guess from."""


class GuessNumber(DrawnTasks):
    """Find one of `size` numbers with at most `max_guesses` guesses; fewer guesses earn more."""

    def __init__(self, size: int = 16, max_guesses: int = 6, num_eval: int = 128) -> None:
        if size < 2 or max_guesses < 1:
            raise ValueError(
                f"need size >= 2 and max_guesses >= 1, got {size}, {max_guesses}"
            )
        self.size = size
        self.max_guesses = max_guesses
        self.max_turns = max_guesses
        self.num_eval = num_eval

    def draw(self, task_id: str, rng: random.Random) -> rw.Task:
        low = rng.choice(LOWEST)
        high = low + self.size - 1
        prompt = f"Guess my number from {low} to {high}."
        return rw.Task(task_id, prompt=prompt, answer=rng.randint(low, high))

    async def user(self, task: rw.Task, chat: rw.Chat) -> str | None:
        guess = number_in(chat.last_text)
        if guess is None:
            return "Say a number."
        return "higher" if guess < task.answer else "lower"

    @rw.stop
    def found(self, task: rw.Task, chat: rw.Chat) -> bool:
        return bool(number_in(chat.last_text) == task.answer)

    @rw.reward
    def soon(self, task: rw.Task, rollout: rw.Rollout) -> float:
        if number_in(rollout.last_text) != task.answer:
            return 0.0
        return 1.0 - (rollout.num_turns - 1) / self.max_guesses

    @rw.metric
    def guesses(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.num_turns)

    @rw.metric
    def unreadable(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(sum(number_in(reply) is None for reply in replies_of(rollout)))


load_environment = GuessNumber
