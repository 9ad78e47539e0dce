"""self-check: count letters, then check the answer. Update, children with a borrowed tool, judge."""

import asyncio
import random
import re
from collections.abc import Sequence

import rollway as rw

from ..drawn_tasks import DrawnTasks

LETTERS = "abcd"
NUM_CHECKS = 2
TURNS_PER_CHECK = 3
_NUMBER = re.compile(r"\d{1,9}")


class LetterCounter(rw.Toolset):
    """Counts letters, and how often it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    @rw.tool
    async def count(self, letter: str, word: str) -> int:
        """How often a letter is in a word."""
        self.num_calls += 1
        return word.count(letter) if letter else 0


class SelfCheck(DrawnTasks):
    """Words of `min_length` to `max_length` of the letters a to d."""

    max_turns = 1 + NUM_CHECKS * TURNS_PER_CHECK

    def __init__(self, min_length: int = 3, max_length: int = 6, num_eval: int = 128) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(f"need 1 <= min_length <= max_length, got {min_length}, {max_length}")
        self.lengths = (min_length, max_length)
        self.num_eval = num_eval

    def draw(self, id: str, chance: random.Random) -> rw.Task:
        word = "".join(chance.choices(LETTERS, k=chance.randint(*self.lengths)))
        letter = chance.choice(LETTERS)
        prompt = f"How many {letter} are in {word}?"
        return rw.Task(id, prompt=prompt, answer=word.count(letter))

    def tools(self, task: rw.Task) -> Sequence[rw.Toolset]:
        return [LetterCounter()]

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        """One answer from the head: what it calls is not run."""
        await chat.say(task.prompt)

    @rw.update
    async def check(self, task: rw.Task, chat: rw.Chat) -> None:
        """Children at the same time, with the tool that this rollout has open."""
        asked = f"{task.prompt} Use the tool. Is it {number_in(chat.last_text)}? Say yes or no."
        async with asyncio.TaskGroup() as tasks:
            children = [
                tasks.create_task(chat.child(asked, tools=chat.tools)) for _ in range(NUM_CHECKS)
            ]
        chat.info["verdicts"] = [says_yes(child.result().last_text) for child in children]
        chat.info["lookups"] = sum(one.num_calls for one in chat.tools if isinstance(one, LetterCounter))

    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(number_in(rollout.reply) == task.answer)

    @rw.reward(weight=0.5)
    def checked(self, task: rw.Task, rollout: rw.Rollout) -> float:
        """The share of children whose verdict on the answer is right."""
        verdicts = rollout.info.get("verdicts", [])
        is_right = number_in(rollout.reply) == task.answer
        return float(sum(verdict == is_right for verdict in verdicts) / NUM_CHECKS)

    @rw.reward(weight=0.25)
    async def convincing(self, task: rw.Task, rollout: rw.Rollout, chat: rw.Chat) -> float:
        """Whether the policy, asked as a judge, agrees. Nothing of this is trained on."""
        reply = await chat.say(f"{task.prompt} Is it {number_in(rollout.reply)}? Say yes or no.")
        return float(says_yes(reply.text))

    @rw.metric
    def lookups(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.info.get("lookups", 0))


def number_in(text: str) -> int | None:
    """The first number in a text."""
    found = _NUMBER.search(text)
    return int(found[0]) if found else None


def says_yes(text: str) -> bool:
    return text.strip().lower().startswith("yes")


def load_environment(min_length: int = 3, max_length: int = 6, num_eval: int = 128) -> SelfCheck:
    return SelfCheck(min_length, max_length, num_eval)
