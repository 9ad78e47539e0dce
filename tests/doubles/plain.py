"""An environment without async: it runs in processes, and asks its worker for turns."""

import os
import time
from collections.abc import Iterator
from typing import Any

import rollway as rw


class Adder(rw.Toolset):
    @rw.tool
    def add(self, a: int, b: int) -> list[int]:
        """The sum, and who computed it."""
        return [a + b, os.getpid()]


class Plain(rw.Environment):
    max_turns = 7

    def tasks(self) -> Iterator[rw.Task]:
        yield rw.Task(id="0", prompt="add 1 2")

    def tools(self, task: rw.Task) -> list[rw.Toolset]:
        return [Adder()]

    def rollout(self, task: rw.Task, chat: Any) -> None:  # type: ignore[override]
        chat.info["pids"] = [os.getpid()]
        chat.act(task.prompt)
        child = chat.child("add 3 4", tools=chat.tools)
        chat.info["child"] = child.last_text
        if task.id == "stuck":
            time.sleep(60)
        if task.id == "endless":
            while True:
                chat.say("hello")

    @rw.update
    def note(self, task: rw.Task, chat: Any) -> None:
        chat.info["pids"].append(os.getpid())
        chat.info["worker"] = os.getppid()

    @rw.reward
    def right(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.info["child"] == "7")

    @rw.metric
    def is_elsewhere(self, task: rw.Task, rollout: rw.Rollout) -> float:
        return float(rollout.info["worker"] not in (*rollout.info["pids"], os.getpid()))
