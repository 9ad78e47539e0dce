"""Scores rollouts: plain rewards in the process lane, async ones here, all under a deadline."""

import asyncio
from collections.abc import Callable, Sequence

from ...config.sections import ServerConfig
from ...envs.chat import Chat
from ...envs.environment import Environment
from ...envs.in_lane import EnvSpec, score, score_group
from ...envs.rewards import scorers
from ...envs.rollout import Rollout
from ...loop.bounded_code import must_end_within
from ...loop.lanes.lanes import Lane
from ...loop.watch import stacks
from ...records.rollout import Failed
from ...records.scores import finite_number, one_for_each
from ...records.task import Task
from ..failures import failed

Scores = dict[str, float]
OnStart = Callable[[], None]


class Scoring:
    def __init__(
        self, config: ServerConfig, spec: EnvSpec, env: Environment, lane: Lane
    ) -> None:
        self._limit_s = config.scoring_deadline_s
        self._queue_s = config.rollout_deadline_s
        self._spec = spec
        self._env = env
        self._lane = lane
        single = [scorer for scorer in scorers(type(env)) if not scorer.is_group]
        self._async_scorers = [scorer for scorer in single if scorer.is_async]
        self._has_plain = len(single) > len(self._async_scorers)
        self._group_scorers = [scorer for scorer in scorers(type(env)) if scorer.is_group]

    async def score(
        self, task: Task, rollout: Rollout, chat: Chat, on_start: OnStart
    ) -> Scores | Failed:
        """Return one rollout's own rewards and metrics by name. `chat` is for rewards that take one.
        `on_start` is called once a process is free for the plain ones."""
        scores: Scores = {}
        deadline: asyncio.Timeout | None = None
        try:
            if self._has_plain:
                scores = await self._lane.call(
                    score,
                    self._spec,
                    task,
                    rollout,
                    deadline_s=self._limit_s,
                    queue_s=self._queue_s,
                    on_start=on_start,
                )
            on_start()
            with must_end_within(self._limit_s, "scoring"):
                async with asyncio.timeout(self._limit_s) as deadline:
                    for scorer in self._async_scorers:
                        name, method = scorer.name, getattr(self._env, scorer.name)
                        extra = {"chat": chat} if scorer.wants_chat else {}
                        score_of = await method(task, rollout, **extra)
                        scores[name] = finite_number(name, score_of)
        except BaseException as error:  # of user code
            return self._failed(error, deadline)
        return scores

    async def score_group(
        self, task: Task, rollouts: Sequence[Rollout]
    ) -> list[Scores] | Failed:
        """Return the scores that group rewards give each of these rollouts of one task."""
        columns: dict[str, list[float]] = {}
        deadline: asyncio.Timeout | None = None
        try:
            if any(not scorer.is_async for scorer in self._group_scorers):
                columns = await self._lane.call(
                    score_group, self._spec, task, tuple(rollouts),
                    deadline_s=self._limit_s, queue_s=self._queue_s,
                )  # fmt: skip
            with must_end_within(self._limit_s, "scoring"):
                async with asyncio.timeout(self._limit_s) as deadline:
                    for scorer in self._group_scorers:
                        if scorer.is_async:
                            name = scorer.name
                            values = await getattr(self._env, name)(task, list(rollouts))
                            count = len(rollouts)
                            columns[name] = one_for_each(name, values, count, "rewards")
        except BaseException as error:  # of user code
            return self._failed(error, deadline)
        return [
            {name: column[index] for name, column in columns.items()}
            for index in range(len(rollouts))
        ]

    def _failed(self, error: BaseException, deadline: asyncio.Timeout | None) -> Failed:
        """`deadline` is None if no async reward ran. These may raise a TimeoutError of their own."""
        is_late = deadline is not None and deadline.expired()
        if is_late and isinstance(error, TimeoutError):
            where = stacks.where_raised(error.__cause__ or error)
            text = f"scoring ran longer than {self._limit_s:g} s"
            return Failed("scorer", text, where=where)
        return failed(error, "scorer")
