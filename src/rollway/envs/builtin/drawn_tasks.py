"""Random tasks of built-in environments; a prompt's hash decides if it is for training or evaluation."""

import itertools
import random
import re
import zlib
from collections.abc import Iterable, Iterator

from ...records.task import Task
from ..environment import Environment
from ..rollout import Rollout

HELD_OUT_ONE_IN = 8
EVAL_SEED = 20_000_003
"""The seed of evaluation tasks, the same for every run, so that runs with different seeds compare."""
MAX_DRAWS = 200
"""Tasks drawn per evaluation task. An evaluation is shorter if they hold too few different prompts."""
_NUMBER = re.compile(r"\d{1,9}")


class DrawnTasks(Environment):
    """An environment with endless training tasks and up to `num_eval` evaluation tasks. Write `draw`."""

    num_eval: int = 128

    def draw(self, task_id: str, rng: random.Random) -> Task:
        """Return a task with this id. All that differs between tasks comes from `rng`."""
        raise NotImplementedError

    def tasks(self) -> Iterator[Task]:
        return (task for task in self._draw_all(self.seed) if not is_held_out(task))

    def eval_tasks(self) -> Iterator[Task]:
        candidates = itertools.islice(self._draw_all(EVAL_SEED), self.num_eval * MAX_DRAWS)
        return itertools.islice(_held_out(candidates), self.num_eval)

    def _draw_all(self, seed: int) -> Iterator[Task]:
        rng = random.Random(seed)
        return (self.draw(str(index), rng) for index in itertools.count())


def _held_out(tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield the tasks that are never trained on, each prompt once."""
    seen: set[str] = set()
    for task in tasks:
        if is_held_out(task) and task.prompt not in seen:
            seen.add(task.prompt)
            yield task


def is_held_out(task: Task) -> bool:
    return zlib.crc32(task.prompt.encode()) % HELD_OUT_ONE_IN == 0


def replies_of(rollout: Rollout) -> list[str]:
    return [message.content for message in rollout.messages if message.role == "assistant"]


def number_in(text: str) -> int | None:
    found = _NUMBER.search(text)
    return int(found[0]) if found else None
