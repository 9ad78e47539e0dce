"""The rollouts of a group that run side by side in one worker, and are scored together."""

import asyncio
from contextvars import Context

from ..envs.rollout import Rollout
from ..records.ids import RolloutId
from ..records.rollout import Failed
from ..records.task import Task
from .scoring import Scores, Scoring


class GroupRun:
    """Where members meet: the last to arrive, or to leave, lets the group be scored."""

    def __init__(self, task: Task, members: frozenset[RolloutId], scoring: Scoring) -> None:
        self.key = min(members)
        self._task = task
        self._scoring = scoring
        self._missing = set(members)
        self._arrived: dict[RolloutId, Rollout] = {}
        self._scored: asyncio.Future[dict[RolloutId, Scores] | Failed] = (
            asyncio.get_running_loop().create_future()
        )
        self._scoring_task: asyncio.Task[None] | None = None

    async def scores(self, id: RolloutId, rollout: Rollout) -> Scores | Failed:
        """What the group rewards give this member, once every other has arrived or left."""
        self._arrived[id] = rollout
        self.leave(id)
        scored = await asyncio.shield(self._scored)
        return scored if isinstance(scored, Failed) else scored[id]

    def leave(self, id: RolloutId) -> None:
        """A member that failed, was cancelled, or has arrived: nobody waits for it."""
        self._missing.discard(id)
        if not self._missing and self._scoring_task is None:
            self._scoring_task = asyncio.get_running_loop().create_task(self._score(), context=Context())

    async def _score(self) -> None:
        members = dict(self._arrived)
        if not members:
            return
        scored = await self._scoring.score_group(self._task, list(members.values()))
        if isinstance(scored, Failed):
            self._scored.set_result(scored)
        else:
            self._scored.set_result(dict(zip(members, scored, strict=True)))
