"""The rollouts of a group that run side by side in one worker, and are scored together."""

import asyncio
from contextvars import Context

from msgspec.structs import replace

from ...envs.rollout import Rollout
from ...errors import CodeRefused
from ...loop.bounded_code import BoundedCode, note_left_code
from ...records.ids import RolloutId
from ...records.rollout import Failed
from ...records.task import Task
from .live_rollout import Finished
from .rewards import Scores, Scoring


class LiveGroup:
    """Where the members of a group meet. The group is scored when the last member arrives or leaves."""

    def __init__(self, task: Task, members: frozenset[RolloutId], scoring: Scoring) -> None:
        self.key = min(members)
        """Names the group among those of this worker."""
        self._task = task
        self._scoring = scoring
        self._missing = set(members)
        self._arrived: dict[RolloutId, Rollout] = {}
        self._complete = asyncio.Event()
        self._scored: BoundedCode[dict[RolloutId, Scores] | Failed] | None = None

    async def join(self, rollout_id: RolloutId, finished: Finished) -> Finished | Failed:
        """Wait until every other member has arrived or left, and add the group rewards' scores."""
        self._arrived[rollout_id] = finished.rollout
        self.leave(rollout_id)
        await self._complete.wait()
        assert self._scored is not None
        try:
            scored = await self._scored.wait()
        except CodeRefused as error:
            note_left_code(error.where)
            return Failed("scorer", error.problem, where=error.where)
        if isinstance(scored, Failed):
            return scored
        return replace(finished, scores={**finished.scores, **scored[rollout_id]})

    def leave(self, rollout_id: RolloutId) -> None:
        """Wait no longer for a member: it failed, was cancelled, or has arrived."""
        self._missing.discard(rollout_id)
        if self._arrived and not self._missing and self._scored is None:
            scoring = self._score(dict(self._arrived))
            self._scored = BoundedCode(scoring, name=f"scoring {self.key}", context=Context())
            self._complete.set()

    async def _score(
        self, members: dict[RolloutId, Rollout]
    ) -> dict[RolloutId, Scores] | Failed:
        scored = await self._scoring.score_group(self._task, list(members.values()))
        return (
            scored if isinstance(scored, Failed) else dict(zip(members, scored, strict=True))
        )
