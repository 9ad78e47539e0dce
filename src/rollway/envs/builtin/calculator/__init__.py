"""calculator: compute an expression by calling tools, one operation at a time. Several turns, tools."""

import random
import re
from collections.abc import Sequence

import rollway as rw

from ..drawn_tasks import DrawnTasks

MAX_CALLS_PER_OPERATION = 2
"""A rollout has turns for this many calls of each operation, and one more for the result."""
_NUMBER = re.compile(r"-?\d{1,18}")


class Arithmetic(rw.Toolset):
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
    """Expressions of `num_operations` operations on numbers up to `top`."""

    system_prompt = "Compute with the tools. Then say only the result."

    def __init__(self, num_operations: int = 3, top: int = 9, num_eval: int = 128) -> None:
        if num_operations < 1 or top < 2:
            raise ValueError(
                f"need num_operations >= 1 and top >= 2, got {num_operations}, {top}"
            )
        self.num_operations = num_operations
        self.top = top
        self.num_eval = num_eval
        self.max_turns = MAX_CALLS_PER_OPERATION * num_operations + 1

    def draw(self, task_id: str, rng: random.Random) -> rw.Task:
        expression, value = self.expression(rng)
        return rw.Task(task_id, prompt=expression, answer=value)

    def expression(self, rng: random.Random) -> tuple[str, int]:
        """Return an expression and its value. Both are built from the innermost operation outwards."""
        value = rng.randint(1, self.top)
        text = str(value)
        for index in range(self.num_operations):
            sign, b = rng.choice("+-*"), rng.randint(1, self.top)
            value = {"+": value + b, "-": value - b, "*": value * b}[sign]
            is_outermost = index == self.num_operations - 1
            text = f"{text} {sign} {b}" if is_outermost else f"({text} {sign} {b})"
        return text, value

    def tools(self, task: rw.Task) -> Sequence[rw.Toolset]:
        return [Arithmetic()]

    @rw.reward
    def exact(self, task: rw.Task, rollout: rw.Rollout) -> float:
        number = _NUMBER.fullmatch(rollout.last_text.strip())
        return float(number is not None and int(number[0]) == task.answer)

    @rw.metric
    def calls(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(sum(message.role == "tool" for message in rollout.messages))


load_environment = Calculator
