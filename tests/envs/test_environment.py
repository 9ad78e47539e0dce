"""Environments as authors write them: which are refused before anything starts, and what marks mean."""

from typing import Any

import pytest

import rollway as rw
from rollway.envs.environment import check
from rollway.envs.marks import hooks
from rollway.envs.rewards import scorers
from rollway.envs.tools import tool_specs
from rollway.errors import EnvironmentInvalid


class NoReward(rw.Environment):
    def tasks(self) -> Any:
        return []


class NotAsync(NoReward):
    def user(self, task: Any, chat: Any) -> None:  # type: ignore[override]
        pass

    @rw.reward
    def one(self, task: Any, rollout: Any) -> float:
        return 1.0


class NoTasks(rw.Environment):
    @rw.reward
    def one(self, task: Any, rollout: Any) -> float:
        return 1.0


class Good(NoTasks, NoReward):
    pass


class AsyncStop(Good):
    @rw.stop
    async def found(self, task: Any, chat: Any) -> bool:
        return True


class NoTurns(Good):
    max_turns = 0


class NoTokens(Good):
    max_rollout_tokens = -1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (NoReward(), "NoReward has no reward; mark at least one method with @rw.reward"),
        (NotAsync(), "NotAsync.user must be 'async def'"),
        (NoTasks(), r"NoTasks has no method tasks\(\)"),
        (AsyncStop(), "AsyncStop.found is a stop condition and must be a plain 'def'"),
        (NoTurns(), "NoTurns.max_turns is 0; use a number from 1 on, or None for no limit"),
        (NoTokens(), "NoTokens.max_rollout_tokens is -1; use a number from 1 on"),
        (3, "test is a int, not an rw.Environment"),
    ],
)
def test_an_environment_that_cannot_run_is_refused(env: Any, message: str) -> None:
    with pytest.raises(EnvironmentInvalid, match=message):
        check(env, "test")
    assert check(Good(), "test")


def test_a_reward_with_a_chat_must_be_async() -> None:
    def judged(self: Any, task: Any, rollout: Any, chat: Any) -> float:
        return 1.0

    with pytest.raises(
        TypeError, match="judged has an argument 'chat', so it must be 'async def'"
    ):
        rw.reward(judged)


class Base(NoTasks):
    @rw.metric
    def two(self, task: Any, rollout: Any) -> float:
        return 2.0

    @rw.stop
    def found(self, task: Any, chat: Any) -> bool:
        return True

    @rw.stop
    def lost(self, task: Any, chat: Any) -> bool:
        return True


class Child(Base):
    def two(self, task: Any, rollout: Any) -> float:  # no longer marked
        return 2.0

    @rw.reward(weight=3)
    async def three(self, task: Any, rollout: Any) -> float:
        return 3.0

    def lost(self, task: Any, chat: Any) -> bool:  # no longer marked
        return True

    @rw.update
    async def note(self, task: Any, chat: Any) -> None:
        pass


def test_marks_follow_inheritance() -> None:
    assert [scorer.name for scorer in scorers(Base)] == ["one", "two"]
    assert [(scorer.name, scorer.weight, scorer.is_async) for scorer in scorers(Child)] == [
        ("one", 1.0, False),
        ("three", 3.0, True),
    ]
    assert list(hooks(Base, "stop")) == ["found", "lost"]
    assert list(hooks(Child, "stop")) == ["found"]
    assert (list(hooks(Base, "update")), list(hooks(Child, "update"))) == ([], ["note"])


def test_tools_follow_inheritance() -> None:
    class Reader(rw.Toolset):
        @rw.tool
        def read(self, line: int) -> str:
            return ""

        @rw.tool
        def remove(self, line: int) -> None:
            pass

    class Writer(Reader):
        def remove(self, line: int) -> None:  # no longer a tool
            pass

        @rw.tool
        async def write(self, text: str) -> None:
            pass

    assert [tool.name for tool in tool_specs(Reader)] == ["read", "remove"]
    assert [(tool.name, tool.is_async) for tool in tool_specs(Writer)] == [
        ("read", False),
        ("write", True),
    ]
