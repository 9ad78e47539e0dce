"""The rollouts of a group that run side by side in one worker, and are scored together."""

import asyncio
from contextvars import Context

from msgspec import structs

from ...envs.rollout import Rollout
from ...records.ids import RolloutId
from ...records.rollout import Failed
from ...records.task import Task
from .attempt import Finished
from .rewards import Scores, Scoring


class LiveGroup:
    """Where members meet: the last to arrive, or to leave, lets the group be scored."""

    def __init__(self, task: Task, members: frozenset[RolloutId], scoring: Scoring) -> None:
        self.key = min(members)
        self._task = task
        self._scoring = scoring
        self._missing = set(members)
        self._arrived: dict[RolloutId, Rollout] = {}
        self._complete = asyncio.Event()
        self._scored: asyncio.Task[dict[RolloutId, Scores] | Failed] | None = None

    async def joined(self, id: RolloutId, done: Finished) -> Finished | Failed:
        """A member with what the group rewards give it, once every other has arrived or left."""
        self._arrived[id] = done.rollout
        self.leave(id)
        await self._complete.wait()
        assert self._scored is not None
        scored = await asyncio.shield(self._scored)
        if isinstance(scored, Failed):
            return scored
        return structs.replace(done, scores={**done.scores, **scored[id]})

    def leave(self, id: RolloutId) -> None:
        """A member that failed, was cancelled, or has arrived: nobody waits for it."""
        self._missing.discard(id)
        if self._arrived and not self._missing and self._scored is None:
            scoring = self._score(dict(self._arrived))
            self._scored = asyncio.get_running_loop().create_task(scoring, context=Context())
            self._complete.set()

    async def _score(self, members: dict[RolloutId, Rollout]) -> dict[RolloutId, Scores] | Failed:
        scored = await self._scoring.score_group(self._task, list(members.values()))
        return scored if isinstance(scored, Failed) else dict(zip(members, scored, strict=True))
