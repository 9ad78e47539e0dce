"""calculator: compute an expression by calling tools, one operation at a time. Several turns, tools."""

import random
import re
from collections.abc import Sequence

import rollway as rw

from ..drawn_tasks import DrawnTasks

MAX_CALLS_PER_STEP = 2
"""A rollout has turns for so many calls of each operation, and one for the result."""
_NUMBER = re.compile(r"-?\d{1,18}")


class Arithmetic(rw.Toolset):
    """Operations on whole numbers."""

    @rw.tool
    async def add(self, a: int, b: int) -> int:
        """a + b"""
        return a + b

    @rw.tool
    async def subtract(self, a: int, b: int) -> int:
        """a - b"""
        return a - b

    @rw.tool
    def multiply(self, a: int, b: int) -> int:
        """a * b"""
        return a * b


class Calculator(DrawnTasks):
    """Expressions of `steps` operations on numbers up to `top`."""

    system_prompt = "Compute with the tools. Then say only the result."

    def __init__(self, steps: int = 3, top: int = 9, num_eval: int = 128) -> None:
        if steps < 1 or top < 2:
            raise ValueError(f"need steps >= 1 and top >= 2, got {steps}, {top}")
        self.steps = steps
        self.top = top
        self.num_eval = num_eval
        self.max_turns = MAX_CALLS_PER_STEP * steps + 1

    def draw(self, id: str, chance: random.Random) -> rw.Task:
        expression, value = self.expression(chance)
        return rw.Task(id, prompt=expression, answer=value)

    def expression(self, chance: random.Random) -> tuple[str, int]:
        """The text grows from the inside out, and its value along with it."""
        value = chance.randint(1, self.top)
        text = str(value)
        for step in range(self.steps):
            sign, b = chance.choice("+-*"), chance.randint(1, self.top)
            value = {"+": value + b, "-": value - b, "*": value * b}[sign]
            text = f"{text} {sign} {b}" if step == self.steps - 1 else f"({text} {sign} {b})"
        return text, value

    def tools(self, task: rw.Task) -> Sequence[rw.Toolset]:
        return [Arithmetic()]

    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        said = _NUMBER.fullmatch(rollout.reply.strip())
        return float(said is not None and int(said[0]) == task.answer)

    @rw.metric
    def calls(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(sum(one.role == "tool" for one in rollout.messages))


def load_environment(steps: int = 3, top: int = 9, num_eval: int = 128) -> Calculator:
    return Calculator(steps, top, num_eval)
