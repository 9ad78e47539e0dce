"""Training and evaluation never share a prompt: a hash of its text decides whose it is."""

import itertools
import zlib
from collections.abc import Iterable, Iterator

from ...records.task import Task

HELD_OUT_ONE_IN = 8
EVAL_SEED = 20_000_003
"""Evaluation draws from a seed of its own, so that runs with different seeds compare."""
MAX_DRAWS = 200
"""For each task of an evaluation; where there are fewer different prompts, it is shorter."""


def training(drawn: Iterable[Task]) -> Iterator[Task]:
    """The tasks that may be trained on."""
    return (task for task in drawn if not is_held_out(task))


def evaluation(drawn: Iterable[Task], count: int) -> Iterator[Task]:
    """Up to `count` different tasks that are never trained on."""
    return itertools.islice(_different(itertools.islice(drawn, count * MAX_DRAWS)), count)


def _different(drawn: Iterable[Task]) -> Iterator[Task]:
    seen: set[str] = set()
    for task in drawn:
        if is_held_out(task) and task.prompt not in seen:
            seen.add(task.prompt)
            yield task


def is_held_out(task: Task) -> bool:
    return zlib.crc32(task.prompt.encode()) % HELD_OUT_ONE_IN == 0
