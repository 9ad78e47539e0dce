"""self-check: count letters, then check the answer. An update, children that borrow a tool, a judge."""

import asyncio
import random
from collections.abc import Sequence

import rollway as rw

from ..drawn_tasks import DrawnTasks, number_in

LETTERS = "abcd"
NUM_CHECKS = 2
TURNS_PER_CHECK = 3


class LetterCounter(rw.Toolset):
    """Counts letters in words, and how often it is called."""

    def __init__(self) -> None:
        self.num_calls = 0

    @rw.tool
    async def count(self, letter: str, word: str) -> int:
        """Count how often a letter occurs in a word."""
        self.num_calls += 1
        return word.count(letter) if letter else 0


class SelfCheck(DrawnTasks):
    """Questions about words of `min_length` to `max_length` letters from a to d."""

    max_turns = 1 + NUM_CHECKS * TURNS_PER_CHECK

    def __init__(self, min_length: int = 3, max_length: int = 6, num_eval: int = 128) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(
                f"need 1 <= min_length <= max_length, got {min_length}, {max_length}"
            )
        self.lengths = (min_length, max_length)
        self.num_eval = num_eval

    def draw(self, task_id: str, rng: random.Random) -> rw.Task:
        word = "".join(rng.choices(LETTERS, k=rng.randint(*self.lengths)))
        letter = rng.choice(LETTERS)
        prompt = f"How many {letter} are in {word}?"
        return rw.Task(task_id, prompt=prompt, answer=word.count(letter))

    def tools(self, task: rw.Task) -> Sequence[rw.Toolset]:
        return [LetterCounter()]

    async def rollout(self, task: rw.Task, chat: rw.Chat) -> None:
        """Ask for an answer without the tool: calls are not run."""
        await chat.say(task.prompt)

    @rw.update
    async def check(self, task: rw.Task, chat: rw.Chat) -> None:
        """Let children check the answer at the same time, with the tool that this rollout has open."""
        answer = number_in(chat.last_text)
        question = f"{task.prompt} Use the tool. Is it {answer}? Say yes or no."
        async with asyncio.TaskGroup() as tasks:
            questions = [chat.child(question, tools=chat.tools) for _ in range(NUM_CHECKS)]
            children = [tasks.create_task(child) for child in questions]
        chat.info["verdicts"] = [says_yes(child.result().last_text) for child in children]
        counters = [toolset for toolset in chat.tools if isinstance(toolset, LetterCounter)]
        chat.info["lookups"] = sum(counter.num_calls for counter in counters)

    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(number_in(rollout.last_text) == task.answer)

    @rw.reward(weight=0.5)
    def checked(self, task: rw.Task, rollout: rw.Rollout) -> float:
        """Return the share of children whose verdict on the answer is right."""
        verdicts = rollout.info.get("verdicts", [])
        is_right = number_in(rollout.last_text) == task.answer
        return float(sum(verdict == is_right for verdict in verdicts) / NUM_CHECKS)

    @rw.reward(weight=0.25)
    async def convincing(self, task: rw.Task, rollout: rw.Rollout, chat: rw.Chat) -> float:
        """Ask the policy as a judge whether it agrees. The judge's tokens are not trained on."""
        answer = number_in(rollout.last_text)
        reply = await chat.say(f"{task.prompt} Is it {answer}? Say yes or no.")
        return float(says_yes(reply.text))

    @rw.metric
    def lookups(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.info.get("lookups", 0))


def says_yes(text: str) -> bool:
    return text.strip().lower().startswith("yes")


load_environment = SelfCheck
