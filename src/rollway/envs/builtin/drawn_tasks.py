"""Tasks drawn by chance, those of training and of evaluation apart: a hash of a prompt's text decides
whose it is, so the two never share one."""

import itertools
import random
import zlib
from collections.abc import Iterable, Iterator

from ...records.task import Task
from ..environment import Environment

HELD_OUT_ONE_IN = 8
EVAL_SEED = 20_000_003
"""Evaluation draws from a seed of its own, so that runs with different seeds compare."""
MAX_DRAWS = 200
"""For each task of an evaluation; where there are fewer different prompts, it is shorter."""


class DrawnTasks(Environment):
    """Training never ends; an evaluation has up to `num_eval` different tasks. Write `draw`."""

    num_eval: int = 128

    def draw(self, id: str, chance: random.Random) -> Task:
        """A task of this id; what differs from one to the next comes from `chance`."""
        raise NotImplementedError

    def tasks(self) -> Iterator[Task]:
        return (task for task in self._drawn(self.seed) if not is_held_out(task))

    def eval_tasks(self) -> Iterator[Task]:
        drawn = itertools.islice(self._drawn(EVAL_SEED), self.num_eval * MAX_DRAWS)
        return itertools.islice(_different(drawn), self.num_eval)

    def _drawn(self, seed: int) -> Iterator[Task]:
        chance = random.Random(seed)
        return (self.draw(str(index), chance) for index in itertools.count())


def _different(drawn: Iterable[Task]) -> Iterator[Task]:
    """Those that are never trained on, each prompt once."""
    seen: set[str] = set()
    for task in drawn:
        if is_held_out(task) and task.prompt not in seen:
            seen.add(task.prompt)
            yield task


def is_held_out(task: Task) -> bool:
    return zlib.crc32(task.prompt.encode()) % HELD_OUT_ONE_IN == 0
