"""guess-number: find a number by guesses that are answered with higher or lower. Several turns."""

import random
import re

import rollway as rw

from ..drawn_tasks import DrawnTasks

LOWEST = range(1, 901)
"""Where the numbers to guess from may begin."""
_NUMBER = re.compile(r"\d{1,9}")


class GuessNumber(DrawnTasks):
    """One of `size` numbers, and `max_guesses` to find it. The sooner, the better."""

    def __init__(self, size: int = 16, max_guesses: int = 6, num_eval: int = 128) -> None:
        if size < 2 or max_guesses < 1:
            raise ValueError(f"need size >= 2 and max_guesses >= 1, got {size}, {max_guesses}")
        self.size = size
        self.max_turns = max_guesses
        self.num_eval = num_eval

    def draw(self, id: str, chance: random.Random) -> rw.Task:
        low = chance.choice(LOWEST)
        high = low + self.size - 1
        prompt = f"Guess my number from {low} to {high}."
        return rw.Task(id, prompt=prompt, answer=chance.randint(low, high))

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
