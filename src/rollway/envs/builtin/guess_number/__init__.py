"""guess-number: find a number by guesses that are answered with higher or lower. Several turns."""

import itertools
import random
import re
from collections.abc import Iterator

import rollway as rw

from ..splits import EVAL_SEED, evaluation, training

LOWEST = range(1, 901)
"""Where the numbers to guess from may begin."""
_NUMBER = re.compile(r"\d{1,9}")


class GuessNumber(rw.Environment):
    """One of `size` numbers, and `max_guesses` to find it. The sooner, the better."""

    def __init__(self, size: int = 16, max_guesses: int = 6, num_eval: int = 128) -> None:
        if size < 2 or max_guesses < 1:
            raise ValueError(f"need size >= 2 and max_guesses >= 1, got {size}, {max_guesses}")
        self.size = size
        self.max_turns = max_guesses
        self.num_eval = num_eval

    def tasks(self) -> Iterator[rw.Task]:
        return training(self.drawn(self.seed))

    def eval_tasks(self) -> Iterator[rw.Task]:
        return evaluation(self.drawn(EVAL_SEED), self.num_eval)

    def drawn(self, seed: int) -> Iterator[rw.Task]:
        rng = random.Random(seed)
        for index in itertools.count():
            low = rng.choice(LOWEST)
            high = low + self.size - 1
            prompt = f"Guess my number from {low} to {high}."
            yield rw.Task(id=str(index), prompt=prompt, answer=rng.randint(low, high))

    async def user(self, task: rw.Task, chat: rw.Chat) -> str | None:
        guess = number_in(chat.reply)
        if guess is None:
            return "Say a number."
        return "higher" if guess < task.answer else "lower"

    @rw.stop
    def found(self, task: rw.Task, chat: rw.Chat) -> bool:
        return bool(number_in(chat.reply) == task.answer)

    @rw.reward
    def soon(self, task: rw.Task, rollout: rw.Rollout) -> float:
        if number_in(rollout.reply) != task.answer:
            return 0.0
        return 1.0 - (rollout.num_turns - 1) / self.max_turns

    @rw.metric
    def guesses(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.num_turns)

    @rw.metric
    def unreadable(self, task: rw.Task, rollout: rw.Rollout) -> float:
        said = [one.content for one in rollout.messages if one.role == "assistant"]
        return float(sum(number_in(text) is None for text in said))


def number_in(text: str) -> int | None:
    """The first number in a text."""
    found = _NUMBER.search(text)
    return int(found[0]) if found else None


def load_environment(size: int = 16, max_guesses: int = 6, num_eval: int = 128) -> GuessNumber:
    return GuessNumber(size, max_guesses, num_eval)
