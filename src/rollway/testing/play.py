"""Plays rollouts of an environment in this process, by the code that workers run."""

import asyncio
import copy
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
from msgspec import Struct

from ..config.sections import ServerConfig
from ..envs.background_tasks import keep_track
from ..envs.environment import Environment, check, needs_whole_groups
from ..envs.in_lane import EnvSpec
from ..envs.rewards import split_scores, total
from ..envs.rollout import Rollout
from ..envserver.worker.attempt import Attempt, Finished
from ..envserver.worker.group import LiveGroup
from ..envserver.worker.plain_code import PlainCode
from ..envserver.worker.record import Record
from ..envserver.worker.rewards import Scoring
from ..envserver.worker.token_speaker import TokenSpeaker
from ..envserver.worker.toolsets import OpenToolsets
from ..errors import RolloutFailed
from ..inference.engines.engine import Engine, open_engine
from ..inference.engines.link import EngineAccess
from ..inference.rendering.rendering import Renderer
from ..records.ids import RolloutId
from ..records.rollout import Failed
from ..records.task import Message, Task
from ..records.turn import Sampling
from ..trace.row import Row
from .engine import ScriptedEngine, scripted_engine
from .lane import ThreadLane
from .model import model, rendering, tokenizer
from .script import Answer

ENGINE_DEADLINE_S = 60.0


class PlayedRow(Struct, frozen=True):
    """One token sequence as the trainer would see it."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 where the policy drew the token."""

    @property
    def text(self) -> str:
        return tokenizer().decode(self.token_ids)


class Played(Struct, frozen=True):
    """A rollout that came to its end, with all there is to know of it."""

    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]
    rollout: Rollout
    rows: tuple[PlayedRow, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.rollout.messages

    @property
    def last_text(self) -> str:
        """The text of the policy's last reply."""
        return self.rollout.last_text

    @property
    def stop(self) -> str:
        """Why it ended: a limit, a stop condition, or how the last turn ended."""
        return self.rollout.stop


class _Given(EnvSpec, frozen=True):
    """An environment that exists already, for code that asks for this process's copy."""

    env: Environment

    def shared(self) -> Environment:
        return self.env


def _copied(env: Environment) -> Environment:
    """What plain code sees: not what async code notes on its own, as in a worker."""
    try:
        return copy.deepcopy(env)
    except Exception:  # it holds something that exists once, such as a connection
        return env


class Stage:
    """What rollouts of one environment share. `async with` closes toolsets of scope `worker`.

    `limits` are keys of a run file's `[env.server]`: `rollout_deadline_s`, `scoring_deadline_s`,
    `tool_deadline_s`.
    """

    def __init__(self, env: Environment, *, max_tokens: int = 1024, **limits: float) -> None:
        self._env = check(env, type(env).__name__)
        self._config = msgspec.convert(limits, ServerConfig)
        spec, lane = _Given(type(env).__name__, b"{}", env.seed, _copied(env)), ThreadLane()
        self._sampling = Sampling(max_tokens)
        self._renderer = Renderer(rendering(), model(), lane)
        self._plain = PlainCode(spec, lane, self._config.rollout_deadline_s)
        self._scoring = Scoring(self._config, spec, env, lane)
        self._keeper = OpenToolsets()

    async def __aenter__(self) -> "Stage":
        loop = asyncio.get_running_loop()
        if loop.get_task_factory() is None:
            keep_track(loop)  # which does nothing to tasks outside of rollouts
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._keeper.__aexit__(*exc)

    async def play(self, task: Task, engine: Engine) -> Played:
        """One rollout; RolloutFailed says why it has no end."""
        (played,) = await self.play_group(task, [engine])
        return played

    async def play_group(self, task: Task, engines: Sequence[Engine]) -> list[Played]:
        """Rollouts of one task at the same time, one with each engine."""
        members = {RolloutId(f"{task.id}.{index}"): one for index, one in enumerate(engines)}
        group = None
        if needs_whole_groups(self._env):
            group = LiveGroup(task, frozenset(members), self._scoring)
        ended = await asyncio.gather(
            *(self._settled(id, task, engine, group) for id, engine in members.items())
        )
        for one in ended:
            if isinstance(one, Failed):
                raise RolloutFailed(f"{one.boundary}: {one.error}", one.boundary, one.traceback)
        return [one for one in ended if isinstance(one, Played)]

    async def _settled(
        self, id: RolloutId, task: Task, engine: Engine, group: LiveGroup | None
    ) -> Played | Failed:
        try:
            return await self._run(id, task, engine, group)
        finally:
            if group is not None:
                group.leave(id)

    async def _run(
        self, id: RolloutId, task: Task, engine: Engine, group: LiveGroup | None
    ) -> Played | Failed:
        record = Record()
        conversation = TokenSpeaker(engine, self._renderer, self._sampling, record)
        done = await Attempt(
            self._config, self._env, task, conversation, self._plain, self._scoring, self._keeper,
            group.key if group else None,
        ).run()  # fmt: skip
        if group is not None and isinstance(done, Finished):
            done = await group.joined(id, done)
        return done if isinstance(done, Failed) else _played(type(self._env), done, record)


def _played(kind: type, done: Finished, record: Record) -> Played:
    rewards, metrics = split_scores(kind, done.scores)
    return Played(
        reward=total(kind, rewards),
        rewards=rewards,
        metrics=metrics,
        rollout=done.rollout,
        rows=tuple(_row(one) for one in record.rows()),
    )


def _row(row: Row) -> PlayedRow:
    return PlayedRow(tuple(row.token_ids.tolist()), tuple(row.loss_mask.tolist()))


async def play(
    env: Environment, task: Task, answer: Answer, *, max_tokens: int = 1024, **limits: float
) -> Played:
    """One rollout of `task` with a policy that answers by script.

    Raises RolloutFailed with the failure's `boundary` and `traceback`, or what the script itself raised.
    """
    (played,) = await play_group(env, task, [answer], max_tokens=max_tokens, **limits)
    return played


async def play_group(
    env: Environment, task: Task, answers: Sequence[Answer], *, max_tokens: int = 1024, **limits: float
) -> list[Played]:
    """A rollout of `task` for each answer, all at the same time, scored as a group."""
    scripted: list[ScriptedEngine] = []
    engines: list[Engine] = []
    async with AsyncExitStack() as stack:
        for answer in answers:
            scripted.append(await stack.enter_async_context(scripted_engine(answer)))
            access = EngineAccess(scripted[-1].url, ENGINE_DEADLINE_S)
            engines.append(await stack.enter_async_context(open_engine(access, routes=True)))
        stage = await stack.enter_async_context(Stage(env, max_tokens=max_tokens, **limits))
        try:
            return await stage.play_group(task, engines)
        except RolloutFailed as failure:
            for error in (error for one in scripted for error in one.errors):
                raise error from failure
            raise
    raise AssertionError("unreachable")
