"""Plays rollouts of an environment in this process, by the code that workers run."""

import asyncio
import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

import msgspec
from msgspec import Struct

from ..config.sections import ServerConfig
from ..envs.background_tasks import keep_track
from ..envs.environment import Environment, check, needs_whole_groups
from ..envs.in_lane import EnvSpec
from ..envs.rewards import split_scores, total
from ..envs.rollout import Rollout
from ..envserver.worker.group import LiveGroup
from ..envserver.worker.kit import build_kit
from ..envserver.worker.live_rollout import LiveRollout
from ..envserver.worker.rollout import play as play_rollout
from ..envserver.worker.token_speaker import TokenSpeaker
from ..errors import RolloutFailed
from ..inference.engines.engine import Engine, open_engine
from ..inference.engines.link import EngineAccess
from ..inference.rendering.rendering import Renderer
from ..inference.replies.checks import ReplyRules
from ..records.ids import PolicyVersion, RolloutId
from ..records.rollout import Failed
from ..records.task import Message, Task
from ..records.turn import Sampling
from ..trace.row import Row
from ..wire.messages import Run
from .engine import ScriptedEngine, scripted_engine
from .lane import ThreadLane
from .model import model, rendering, tokenizer
from .script import Answer

ENGINE_DEADLINE_S = 60.0
SHOWN_CHARS = 60
"""Characters of a text that a repr shows."""


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]!r}…"


class PlayedRow(Struct, frozen=True):
    """One token sequence as the trainer would see it."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 where the policy drew the token."""

    @property
    def text(self) -> str:
        return tokenizer().decode(self.token_ids)

    def __repr__(self) -> str:
        tokens = f"{len(self.token_ids)} tokens, {sum(self.loss_mask)} drawn by the policy"
        return f"PlayedRow({tokens}, {_shorten(self.text)})"


class Played(Struct, frozen=True):
    """A rollout that ended and was scored."""

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
        return self.rollout.last_text

    @property
    def stop(self) -> str:
        """Why the rollout ended: a limit, a stop condition, or how the last turn ended."""
        return self.rollout.stop

    def __repr__(self) -> str:
        return (
            f"Played(reward={self.reward:g}, rewards={self.rewards}, metrics={self.metrics}, "
            f"{self.rollout.num_turns} turns, {self.rollout.num_tokens} tokens drawn, "
            f"{len(self.rows)} rows, stop={self.stop!r}, last_text={_shorten(self.last_text)})"
        )


class _GivenEnv(EnvSpec, frozen=True, kw_only=True):
    """An environment that exists already, for code that asks for its process's copy."""

    env: Environment

    def shared(self) -> Environment:
        return self.env


def _copy_for_plain_code(env: Environment) -> Environment:
    """Copy the environment: as in a worker, plain code does not see what async code notes on `self`."""
    try:
        return copy.deepcopy(env)
    except Exception as error:
        # the environment may hold something that exists only once, such as a connection
        warnings.warn(
            f"{type(env).__name__} cannot be copied ({error!r}), so plain (not async) code of this test "
            "shares it with async code. In a worker, plain code has its own copy of the environment.",
            stacklevel=3,
        )
        return env


_tracking_stages: Counter[asyncio.AbstractEventLoop] = Counter()
"""Open stages by the loop whose tasks they track. The last one to close restores the loop."""


@contextmanager
def _tracked_tasks() -> Iterator[None]:
    """Let rollouts end the tasks they start, as in a worker, unless the loop has a task factory."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        keep_track(loop)
    elif not _tracking_stages[loop]:
        yield
        return
    _tracking_stages[loop] += 1
    try:
        yield
    finally:
        _tracking_stages[loop] -= 1
        if not _tracking_stages[loop]:
            del _tracking_stages[loop]
            loop.set_task_factory(None)


class _StageSpeakers:
    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.engines: dict[int, Engine] = {}
        """By the serial number of the rollout."""

    def speaker_for(self, live: LiveRollout) -> TokenSpeaker:
        return TokenSpeaker(self.engines[live.run.serial], self._renderer, live)


class Stage:
    """What rollouts of one environment share. `async with` closes toolsets of scope `worker`. `limits`
    are the keys `rollout_deadline_s`, `scoring_deadline_s` and `tool_deadline_s` of `[env.server]`."""

    def __init__(self, env: Environment, *, max_tokens: int = 1024, **limits: float) -> None:
        name = type(env).__name__
        check(env, name)
        config = msgspec.convert(limits, ServerConfig)
        spec = _GivenEnv(name, b"{}", env.seed, env=_copy_for_plain_code(env))
        lane = ThreadLane()
        self._sampling = Sampling(max_tokens)
        self._speakers = _StageSpeakers(Renderer(rendering(), model(), lane))
        self._kit = build_kit(config, spec, env, self._speakers, lane, lane)
        self._serials = itertools.count(1)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Stage":
        self._stack.enter_context(_tracked_tasks())
        await self._stack.enter_async_context(self._kit.toolsets)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def play(self, task: Task, engine: Engine) -> Played:
        """Play one rollout. RolloutFailed says why a rollout failed."""
        return (await self.play_group(task, [engine]))[0]

    async def play_group(self, task: Task, engines: Sequence[Engine]) -> list[Played]:
        """Play rollouts of one task at the same time, one with each engine."""
        runs = [self._run(task) for _ in engines]
        group = None
        if needs_whole_groups(self._kit.env):
            ids = frozenset(run.rollout_id for run in runs)
            group = LiveGroup(task, ids, self._kit.scoring)
        members = zip(runs, engines, strict=True)
        ends = await asyncio.gather(
            *(self._play_member(*member, group) for member in members)
        )
        for end in ends:
            if isinstance(end, Failed):
                raise RolloutFailed(end.text, end.boundary, end.traceback)
        return [end for end in ends if isinstance(end, Played)]

    def _run(self, task: Task) -> Run:
        serial = next(self._serials)
        rollout_id, version = RolloutId(f"{task.id}#{serial}"), PolicyVersion(0)
        return Run(rollout_id, 1, task, self._sampling, version, group=0, serial=serial)

    async def _play_member(
        self, run: Run, engine: Engine, group: LiveGroup | None
    ) -> Played | Failed:
        live, engines = LiveRollout(run), self._speakers.engines
        engines[run.serial] = engine
        try:
            finished = await play_rollout(self._kit, live, group)
        finally:
            del engines[run.serial]
            if group is not None:
                group.leave(run.rollout_id)
        if isinstance(finished, Failed):
            return finished
        kind, rows = type(self._kit.env), map(_played_row, live.trace.finish())
        rewards, metrics = split_scores(kind, finished.scores)
        return Played(total(kind, rewards), rewards, metrics, finished.rollout, tuple(rows))


def _played_row(row: Row) -> PlayedRow:
    return PlayedRow(tuple(row.token_ids.tolist()), tuple(row.loss_mask.tolist()))


async def play(
    env: Environment,
    task: Task,
    answer: Answer,
    *,
    max_tokens: int = 1024,
    max_context: int | None = None,
    **limits: float,
) -> Played:
    """Play one rollout of `task` with a policy that answers by script, in a context window of
    `max_context` tokens. Raises RolloutFailed with the failure's `boundary` and `traceback`, or what the
    script itself raised."""
    (played,) = await play_group(
        env, task, [answer], max_tokens=max_tokens, max_context=max_context, **limits
    )
    return played


async def play_group(
    env: Environment,
    task: Task,
    answers: Sequence[Answer],
    *,
    max_tokens: int = 1024,
    max_context: int | None = None,
    **limits: float,
) -> list[Played]:
    """Play a rollout of `task` for each answer, all at the same time, and score them as a group."""
    scripted: list[ScriptedEngine] = []
    engines: list[Engine] = []
    async with AsyncExitStack() as stack:
        for answer in answers:
            serving = scripted_engine(answer, max_context=max_context)
            scripted.append(await stack.enter_async_context(serving))
            access = EngineAccess(scripted[-1].url, ENGINE_DEADLINE_S)
            opening = open_engine(access, ReplyRules(wants_routes=True))
            engines.append(await stack.enter_async_context(opening))
        stage = await stack.enter_async_context(Stage(env, max_tokens=max_tokens, **limits))
        try:
            return await stage.play_group(task, engines)
        except RolloutFailed as failure:
            errors = [error for engine in scripted for error in engine.errors]
            if errors:
                raise errors[0] from failure
            raise
    raise AssertionError("unreachable")
