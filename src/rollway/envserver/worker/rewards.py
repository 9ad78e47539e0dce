"""Scores rollouts: plain rewards in the process lane, async ones here, all under a deadline."""

import asyncio
from collections.abc import Sequence

from ...config.sections import ServerConfig
from ...envs.chat import Chat
from ...envs.environment import Environment
from ...envs.in_lane import EnvSpec, score, score_group
from ...envs.rewards import Scorer, scorers
from ...envs.rollout import Rollout
from ...loop.coroutines import is_cancelled
from ...loop.lanes.lanes import Lane
from ...records.rollout import Failed
from ...records.scores import finite_number, one_for_each
from ...records.task import Task
from ..failures import failed

Scores = dict[str, float]


class Scoring:
    """One environment's rewards and metrics."""

    def __init__(self, config: ServerConfig, spec: EnvSpec, env: Environment, lane: Lane) -> None:
        self._limit_s = config.scoring_deadline_s
        self._queue_s = config.rollout_deadline_s
        self._spec = spec
        self._env = env
        self._lane = lane
        own = [one for one in scorers(type(env)) if not one.is_group]
        self._own_here = [one for one in own if one.is_async]
        self._has_plain = len(own) > len(self._own_here)
        self._of_groups = [one for one in scorers(type(env)) if one.is_group]

    async def score(self, task: Task, rollout: Rollout, chat: Chat) -> Scores | Failed:
        """One rollout's own rewards and metrics, by name; `chat` is for those that ask for it."""
        scores: Scores = {}
        try:
            if self._has_plain:
                scores = await self._lane.call(
                    score, self._spec, task, rollout, deadline_s=self._limit_s, queue_s=self._queue_s
                )
            async with asyncio.timeout(self._limit_s):
                for one in self._own_here:
                    value = await self._ask(one, task, rollout, chat)
                    scores[one.name] = finite_number(one.name, value)
        except (Exception, asyncio.CancelledError) as error:
            return self._failed(task, error)
        return scores

    async def _ask(self, one: Scorer, task: Task, rollout: Rollout, chat: Chat) -> object:
        method = getattr(self._env, one.name)
        return await (method(task, rollout, chat=chat) if one.wants_chat else method(task, rollout))

    async def score_group(self, task: Task, rollouts: Sequence[Rollout]) -> list[Scores] | Failed:
        """What the group rewards give each of these rollouts of one task."""
        columns: dict[str, list[float]] = {}
        try:
            if any(not one.is_async for one in self._of_groups):
                columns = await self._lane.call(
                    score_group, self._spec, task, tuple(rollouts),
                    deadline_s=self._limit_s, queue_s=self._queue_s,
                )  # fmt: skip
            async with asyncio.timeout(self._limit_s):
                for one in self._of_groups:
                    if one.is_async:
                        values = await getattr(self._env, one.name)(task, list(rollouts))
                        columns[one.name] = one_for_each(one.name, values, len(rollouts), "rewards")
        except (Exception, asyncio.CancelledError) as error:
            return self._failed(task, error)
        return [
            {name: column[index] for name, column in columns.items()} for index in range(len(rollouts))
        ]

    def _failed(self, task: Task, error: BaseException) -> Failed:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise error
        if isinstance(error, TimeoutError):
            return Failed("scorer", f"task '{task.id}': scoring ran longer than {self._limit_s:g} s")
        return failed(task, error, "scorer")
