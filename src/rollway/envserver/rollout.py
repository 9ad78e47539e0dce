"""Runs one rollout from its task to its outcome: conversation, rewards, payload."""

import asyncio
import time
import traceback
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from ..config.sections import EnvConfig
from ..envs.chat import Chat
from ..envs.environment import Environment
from ..envs.rewards import scorers, total
from ..envs.rollout import Rollout
from ..envs.source import EnvSpec, as_score, score
from ..errors import EngineError, LaneError, LaneRaised, PayloadError, RollwayError, TraceError
from ..inference.engine import Engine
from ..inference.rendering import Renderer
from ..loop.lanes import ProcessLane
from ..payload.blob import Blob, build, row_columns
from ..payload.store import PayloadStore
from ..records.ids import PolicyVersion
from ..records.rollout import Failed, Outcome, Scored, Timing
from ..records.task import Task
from ..trace.row import Row
from ..wire.messages import Run
from .conversation import Conversation
from .track import Track

MAX_ERROR, MAX_TRACEBACK = 500, 8_000
"""Characters of an error that travel with its record."""
OUR_CODE = str(Path(__file__).resolve().parent.parent)


class RolloutRunner:
    """What rollouts of one worker share: the environment, the engine, the lane, the segment."""

    def __init__(
        self, config: EnvConfig, spec: EnvSpec, env: Environment, engine: Engine, renderer: Renderer,
        lane: ProcessLane, store: PayloadStore,
    ) -> None:  # fmt: skip
        self._config = config
        self._spec = spec
        self._env = env
        self._engine = engine
        self._renderer = renderer
        self._lane = lane
        self._store = store

    async def run(self, run: Run, track: Track) -> Outcome:
        """The rollout's end. Only cancellation and bugs of ours come out as exceptions."""
        start_s = time.monotonic()
        conversation = Conversation(self._engine, self._renderer, run.sampling, track)
        chat = Chat(conversation.generate, self._env.system_prompt)
        track.enter("env")
        failed = await self._converse(run.task, chat)
        if failed is None and not conversation.trace.num_turns:
            failed = Failed("env", f"rollout() of task '{run.task.id}' never spoke to the policy")
        if failed is not None:
            return failed
        rollout_s = time.monotonic() - start_s
        finished = Rollout(
            messages=tuple(chat.messages),
            num_turns=conversation.trace.num_turns,
            num_tokens=conversation.trace.num_sampled,
            stop=conversation.stop,
            info=chat.info,
        )
        track.enter("scoring")
        scores = await self._score(run.task, finished)
        if isinstance(scores, Failed):
            return scores
        timing = Timing(
            engine_s=conversation.engine_s,
            env_s=rollout_s - conversation.engine_s,
            scoring_s=time.monotonic() - start_s - rollout_s,
            total_s=time.monotonic() - start_s,
        )
        track.enter("committing")
        return await self._commit(conversation, finished, scores, timing)

    async def _converse(self, task: Task, chat: Chat) -> Failed | None:
        """The environment's own code, under the rollout's deadline."""
        try:
            async with asyncio.timeout(self._config.rollout_deadline_s) as deadline:
                await self._env.rollout(task, chat)
        except (EngineError, TraceError) as error:
            return Failed("engine", _short(error))
        except LaneError as error:
            return Failed("worker", _short(error))
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            return _failed_in_env(task, error)
        except Exception as error:
            if deadline.expired():
                limit = self._config.rollout_deadline_s
                return Failed("deadline", f"task '{task.id}' ran longer than {limit:g} s")
            return _failed_in_env(task, error)
        return None

    async def _score(self, task: Task, rollout: Rollout) -> dict[str, float] | Failed:
        """Plain rewards in the process lane, async ones here; all under the scoring deadline."""
        limit = self._config.scoring_deadline_s
        kind = type(self._env)
        scores: dict[str, float] = {}
        try:
            if any(not one.is_async for one in scorers(kind)):
                scores = await self._lane.call(
                    score, self._spec, task, rollout,
                    deadline_s=limit, queue_s=self._config.rollout_deadline_s,
                )  # fmt: skip
            async with asyncio.timeout(limit):
                for one in scorers(kind):
                    if one.is_async:
                        value = await getattr(self._env, one.name)(task, rollout)
                        scores[one.name] = as_score(one.name, value)
        except LaneRaised as error:
            return Failed(
                "scorer", f"task '{task.id}': {_short(error)}", error.traceback[-MAX_TRACEBACK:]
            )
        except LaneError as error:
            return Failed("scorer", f"task '{task.id}': {error}")
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            return Failed("scorer", f"task '{task.id}': {error!r}", _user_traceback(error))
        except TimeoutError:
            return Failed("scorer", f"task '{task.id}': scoring ran longer than {limit:g} s")
        except Exception as error:
            return Failed("scorer", f"task '{task.id}': {_short(error)}", _user_traceback(error))
        return scores

    async def _commit(
        self, conversation: Conversation, rollout: Rollout, scores: dict[str, float], timing: Timing
    ) -> Outcome:
        """Write the columns, then speak of them."""
        rows = conversation.trace.finish()
        try:
            ref = await self._store.append(_blob(rows, rollout))
        except PayloadError as error:
            return Failed("worker", str(error))
        rewards = {one.name: scores[one.name] for one in scorers(type(self._env)) if not one.is_metric}
        metrics = {name: value for name, value in scores.items() if name not in rewards}
        return Scored(
            reward=total(type(self._env), scores),
            rewards=rewards,
            metrics=metrics,
            rows=tuple(row.summary for row in rows),
            ref=ref,
            num_turns=rollout.num_turns,
            stop=rollout.stop,
            first_version=PolicyVersion(conversation.versions[0]),
            last_version=PolicyVersion(conversation.versions[-1]),
            timing=timing,
        )


def _blob(rows: tuple[Row, ...], rollout: Rollout) -> Blob:
    """The rows' columns, and the transcript as JSON for whoever wants to read it."""
    transcript = np.frombuffer(msgspec.json.encode(rollout.messages), np.uint8)
    return build({**row_columns(row.columns() for row in rows), "transcript": (transcript,)})


def _failed_in_env(task: Task, error: BaseException) -> Failed:
    return Failed("env", f"task '{task.id}': {_short(error)}", _user_traceback(error))


def _is_cancelled() -> bool:
    """Whether this rollout is being cancelled, rather than something its own code awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _short(error: BaseException) -> str:
    """What went wrong, in a record's size."""
    text = str(error) if isinstance(error, RollwayError) else repr(error)
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…"


def _user_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(OUR_CODE):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))[-MAX_TRACEBACK:]
