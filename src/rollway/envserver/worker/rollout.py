"""Runs one rollout from its task to its outcome: conversation, rewards, payload."""

import msgspec
import numpy as np

from ...config.sections import ServerConfig
from ...envs.environment import Environment
from ...envs.rewards import split_scores, total
from ...envs.rollout import Rollout
from ...errors import PayloadError
from ...payload.blob import Blob, build, row_columns
from ...payload.store import PayloadStore
from ...records.ids import PolicyVersion
from ...records.rollout import Failed, Outcome, Scored
from ...trace.row import Row
from ...wire.messages import Run
from ..core.open_runs import group_number
from .attempt import Attempt, Finished
from .group import LiveGroup
from .plain_code import PlainCode
from .record import Record
from .rewards import Scoring
from .speakers import SpeakerFactory
from .toolsets import OpenToolsets
from .track import Track


class RolloutRunner:
    """What rollouts of one worker share: the environment, the policy, the lanes, tools, the store."""

    def __init__(
        self, config: ServerConfig, env: Environment, policy: SpeakerFactory,
        plain: PlainCode, scoring: Scoring, keeper: OpenToolsets, store: PayloadStore,
    ) -> None:  # fmt: skip
        self._config = config
        self._env = env
        self._policy = policy
        self._plain = plain
        self._scoring = scoring
        self._keeper = keeper
        self._store = store

    def group_of(self, runs: tuple[Run, ...]) -> LiveGroup:
        """For rollouts that are told to run together."""
        members = frozenset(run.rollout_id for run in runs)
        return LiveGroup(runs[0].task, members, self._scoring)

    async def run(self, run: Run, track: Track, group: LiveGroup | None = None) -> Outcome:
        """The rollout's end. Only cancellation and bugs of ours come out as exceptions."""
        talk = self._policy.talk(run.sampling, track, group_number(run.rollout_id))
        attempt = Attempt(
            self._config, self._env, run.task, talk, self._plain, self._scoring, self._keeper,
            group.key if group else None,
        )  # fmt: skip
        done = await attempt.run()
        if group is not None and isinstance(done, Finished):
            done = await group.joined(run.rollout_id, done)
        if isinstance(done, Failed):
            return done
        track.enter("committing")
        return await self._commit(talk.record, done, run.queued_s)

    async def _commit(self, record: Record, done: Finished, queue_s: float) -> Outcome:
        """Write the columns, then speak of them."""
        rows = record.rows()
        try:
            ref = await self._store.append(_blob(rows, done.rollout))
        except PayloadError as error:
            return Failed("worker", str(error))
        kind = type(self._env)
        rewards, metrics = split_scores(kind, done.scores)
        return Scored(
            reward=total(kind, rewards),
            rewards=rewards,
            metrics=metrics,
            rows=tuple(row.summary() for row in rows),
            ref=ref,
            num_turns=done.rollout.num_turns,
            stop=done.rollout.stop,
            first_version=PolicyVersion(record.versions[0]),
            last_version=PolicyVersion(record.versions[-1]),
            timing=msgspec.structs.replace(done.timing, queue_s=queue_s),
            num_sampled=record.num_sampled,
        )


def _blob(rows: tuple[Row, ...], rollout: Rollout) -> Blob:
    """The rows' columns, and the transcript as JSON for whoever wants to read it."""
    transcript = np.frombuffer(msgspec.json.encode(rollout.messages), np.uint8)
    return build({**row_columns(row.columns() for row in rows), "transcript": (transcript,)})
