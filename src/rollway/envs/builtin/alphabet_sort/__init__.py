"""alphabet-sort: keep a list of names sorted while a simulated user adds more. Several turns."""

import difflib
import itertools
import operator
import random

import rollway as rw

from ..drawn_tasks import DrawnTasks, replies_of

NAMES = (
    "Ada", "Ann", "Ben", "Bob", "Cal", "Cleo", "Dan", "Dora", "Eli", "Eve", "Finn", "Fay", "Gil", "Gus",
    "Hal", "Hope", "Ian", "Ivy", "Jan", "Joe", "Kim", "Kit", "Lea", "Leo", "Max", "Mia", "Ned", "Nora",
    "Olga", "Otto", "Pam", "Pia", "Ray", "Rosa", "Sam", "Sue", "Tess", "Tom", "Uma", "Vic", "Wes", "Zoe",
)  # fmt: skip


class AlphabetSort(DrawnTasks):
    """The user gives `num_batches` batches of up to `max_names` names; a reply is the sorted list."""

    system_prompt = "Keep the names sorted. Say all of them, with commas."

    def __init__(self, num_batches: int = 3, max_names: int = 3, num_eval: int = 128) -> None:
        if num_batches < 1 or max_names < 1 or num_batches * max_names > len(NAMES):
            need = f"num_batches and max_names of at least 1 and at most {len(NAMES)} names together"
            raise ValueError(f"need {need}, got {num_batches}, {max_names}")
        self.num_batches = num_batches
        self.max_names = max_names
        self.num_eval = num_eval

    def draw(self, task_id: str, rng: random.Random) -> rw.Task:
        drawn = iter(rng.sample(NAMES, self.num_batches * self.max_names))
        sizes = [rng.randint(1, self.max_names) for _ in range(self.num_batches)]
        batches = [list(itertools.islice(drawn, size)) for size in sizes]
        answer = [sorted(names) for names in itertools.accumulate(batches, operator.add)]
        prompt = f"Sort: {', '.join(batches[0])}"
        return rw.Task(task_id, prompt, answer, info={"batches": batches})

    async def user(self, task: rw.Task, chat: rw.Chat) -> str | None:
        batches = task.info["batches"][len(chat.replies) :]
        return f"Add: {', '.join(batches[0])}" if batches else None

    @rw.reward
    def similar(self, task: rw.Task, rollout: rw.Rollout) -> float:
        lists = map(names_in, replies_of(rollout))
        pairs = zip(lists, task.answer, strict=False)
        return sum(similarity(names, right) for names, right in pairs) / len(task.answer)

    @rw.metric
    def last_list_right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(names_in(rollout.last_text) == task.answer[-1])


def names_in(reply: str) -> list[str]:
    return [name.strip() for name in reply.split(",")]


def similarity(names: list[str], right: list[str]) -> float:
    """Return 1 for equal lists, otherwise the share of names that are in the same order in both."""
    names = names[: 4 * len(NAMES)]
    return difflib.SequenceMatcher(None, names, right, autojunk=False).ratio()


load_environment = AlphabetSort
