"""One rollout's conversation and scores: everything but the writing of its columns."""

import asyncio
import inspect
import time
from contextlib import AsyncExitStack

from msgspec import Struct

from ...config.sections import ServerConfig
from ...envs.background_tasks import cancel_leftover_tasks
from ...envs.chat import Chat, Speaker, stop_in
from ...envs.environment import Environment
from ...envs.limits import TurnLimits
from ...envs.marks import hooks
from ...envs.rollout import Rollout
from ...envs.toolbox import Toolbox
from ...errors import LaneTimeout
from ...loop.coroutines import is_cancelled
from ...records.rollout import Failed, Timing
from ...records.task import Task
from ..failures import failed, too_late
from .plain_code import PlainCode
from .rewards import Scoring
from .speakers import Talk
from .toolsets import OpenToolsets

LAST_WORDS_S = 2.0


class Finished(Struct, frozen=True):
    """A rollout that was held and scored; its rows are still in memory."""

    rollout: Rollout
    scores: dict[str, float]
    timing: Timing


class Attempt:
    """Runs user code for one rollout. Whatever that does, the end is Finished or Failed."""

    def __init__(
        self, config: ServerConfig, env: Environment, task: Task, talk: Talk,
        plain: PlainCode, scoring: Scoring, keeper: OpenToolsets, group: str | None,
    ) -> None:  # fmt: skip
        self._config = config
        self._env = env
        self._task = task
        self._talk = talk
        self._plain = plain
        self._scoring = scoring
        self._keeper = keeper
        self._group = group
        self._limits = TurnLimits(env.max_turns, env.max_rollout_tokens)
        self._stop = ""
        self._until_s = 0.0

    async def run(self) -> Finished | Failed:
        """Tools are open from the first turn to the last reward, and closed before this returns."""
        start_s = time.monotonic()
        try:
            async with AsyncExitStack() as stack:
                held = await self._held(stack)
                if isinstance(held, Failed):
                    return held
                rollout_s = time.monotonic() - start_s
                rollout = self._finished(held)
                self._talk.record.track.enter("scoring")
                async with cancel_leftover_tasks():
                    scores = await self._scoring.score(self._task, rollout, self._aside(held))
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return failed(self._task, error, "env")
        except Exception as error:  # a toolset that cannot be closed
            return failed(self._task, error, "env")
        if isinstance(scores, Failed):
            return scores
        total_s = time.monotonic() - start_s
        engine_s = self._talk.record.engine_s
        timing = Timing(engine_s, max(0.0, rollout_s - engine_s), total_s - rollout_s, total_s)
        return Finished(rollout, scores, timing)

    async def _held(self, stack: AsyncExitStack) -> Chat | Failed:
        """The chat, after the environment's rollout and its updates, under the rollout's deadline."""
        task, limit = self._task, self._config.rollout_deadline_s
        self._until_s = time.monotonic() + limit
        try:
            async with asyncio.timeout(limit) as deadline:
                toolsets = await stack.enter_async_context(
                    self._keeper.opened(self._env.tools(task), self._group)
                )
                chat = self._chat(self._talk, self._toolbox(toolsets))
                async with cancel_leftover_tasks():
                    await self._roll_out(chat)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return failed(task, error, "env")
        except Exception as error:  # of user code
            if deadline.expired() or isinstance(error, LaneTimeout):
                return too_late(task, error, limit)
            return failed(task, error, "env")
        if not self._talk.record.num_turns:
            return Failed("env", f"rollout() of task '{task.id}' never spoke to the policy")
        return chat

    async def _roll_out(self, chat: Chat) -> None:
        """A stop condition or limit ends the rollout; updates come in any case."""
        for name in ("rollout", *hooks(type(self._env), "update")):
            self._talk.record.track.enter("env" if name == "rollout" else "update")
            try:
                await self._call(name, chat)
            except Exception as error:  # of user code, which may pass a stop on in a group
                stop = stop_in(error)
                if not stop:
                    raise
                self._stop = self._stop or stop

    async def _call(self, method: str, chat: Chat) -> None:
        call = getattr(self._env, method)
        if inspect.iscoroutinefunction(call):
            await call(self._task, chat)
        else:
            await self._plain.run(method, self._task, chat, self._time_for_plain())

    def _time_for_plain(self) -> float:
        """A little less than the rollout has left, so that the lane can say where plain code was."""
        left_s = max(0.0, self._until_s - time.monotonic())
        return left_s - min(LAST_WORDS_S, left_s / 10)

    def _chat(self, speaker: Speaker, toolbox: Toolbox) -> Chat:
        return Chat(
            speaker, toolbox, self._limits,
            system_prompt=self._env.system_prompt, maybe_stop=self._stop_condition,
        )  # fmt: skip

    def _aside(self, chat: Chat) -> Chat:
        """A chat for rewards: the same open tools, nothing recorded, no limits of the rollout."""
        toolbox = self._toolbox(chat.tools)
        return Chat(self._talk.aside(), toolbox, TurnLimits(), info=dict(chat.info))

    def _toolbox(self, toolsets: tuple[object, ...]) -> Toolbox:
        deadline_s = self._config.tool_deadline_s

        async def call_plain(name: str, arguments: dict[str, object]) -> object:
            return await self._plain.call_tool(self._task, name, arguments, deadline_s)

        within = self._talk.record.track.within
        return Toolbox(toolsets, call_plain, deadline_s, within)  # type: ignore[arg-type]

    async def _stop_condition(self, chat: Chat) -> str:
        for name in hooks(type(self._env), "stop"):
            if getattr(self._env, name)(self._task, chat):
                return name
        return ""

    def _finished(self, chat: Chat) -> Rollout:
        record = self._talk.record
        return Rollout(
            messages=tuple(chat.messages),
            num_turns=record.num_turns,
            num_tokens=record.num_sampled,
            stop=self._stop or record.stop,
            info=chat.info,
        )
