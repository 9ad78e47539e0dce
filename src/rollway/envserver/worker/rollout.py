"""Plays one rollout from its task to its scores, and commits its columns to the payload store."""

import asyncio
import inspect
import time
from collections.abc import Generator
from contextlib import AsyncExitStack
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from ...envs.background_tasks import cancel_leftover_tasks
from ...envs.chat import Chat, stop_in
from ...envs.marks import hooks
from ...envs.rewards import split_scores, total
from ...envs.rollout import Rollout
from ...envs.toolbox import Toolbox
from ...envs.tools import Toolset
from ...errors import LaneTimeout, PayloadError
from ...loop.bounded_code import must_end_within
from ...loop.coroutines import run_in_slices
from ...payload.blob import TEXT, row_columns
from ...payload.store import PayloadStore
from ...records.ids import PolicyVersion
from ...records.rollout import Failed, Outcome, RowSummary, Scored, Timing
from ...trace.row import Row
from ..failures import failed, too_late
from .group import LiveGroup
from .kit import Kit
from .live_rollout import Finished, LiveRollout
from .transcript import transcript

PLAIN_MARGIN_S = 2.0
"""Plain code is ended this long before the rollout's deadline, so that its lane can name the line."""


async def play(kit: Kit, live: LiveRollout, group: LiveGroup | None) -> Finished | Failed:
    """Play a rollout and score it. What user code raises, even SystemExit, fails this rollout alone.
    Cancellation and our own bugs come out as exceptions. Toolsets are closed after the rollout's last
    reward, before it waits for the other members of its group."""
    task, start_s = live.run.task, time.monotonic()
    try:
        async with AsyncExitStack() as stack:
            chat = await _converse(kit, live, stack, group.key if group else None)
            if isinstance(chat, Failed):
                return chat
            rollout_s = time.monotonic() - start_s
            num_turns, num_tokens = live.num_turns, live.num_tokens
            rollout = Rollout(
                tuple(chat.messages), num_turns, num_tokens, live.stop, chat.info
            )
            live.enter("waiting to be scored")
            async with cancel_leftover_tasks():
                scores = await kit.scoring.score(
                    task, rollout, chat.aside(), partial(live.enter, "scoring")
                )
            live.enter("closing tools")
    except BaseException as error:  # a toolset that cannot be closed
        return failed(error, "env")
    if isinstance(scores, Failed):
        return scores
    total_s, engine_s = time.monotonic() - start_s, live.engine_s
    timing = Timing(engine_s, max(0.0, rollout_s - engine_s), total_s - rollout_s, total_s)
    finished = Finished(rollout, scores, timing)
    return finished if group is None else await group.join(live.run.rollout_id, finished)


async def _converse(
    kit: Kit, live: LiveRollout, stack: AsyncExitStack, group_key: str | None
) -> Chat | Failed:
    """Open the toolsets, then run the environment's rollout and its updates, all within the deadline. A
    stop condition or a limit ends the rollout. Updates run in any case."""
    task, env, limit_s = live.run.task, kit.env, kit.config.rollout_deadline_s
    until_s = time.monotonic() + limit_s
    try:
        with must_end_within(limit_s, "the rollout"):
            async with asyncio.timeout(limit_s) as deadline:
                tools = kit.toolsets.opened(env.tools(task), group_key)
                chat = _open_chat(kit, live, await stack.enter_async_context(tools))
                async with cancel_leftover_tasks():
                    for name in ("rollout", *hooks(type(env), "update")):
                        live.enter("env" if name == "rollout" else "update")
                        method = getattr(env, name)
                        try:
                            if inspect.iscoroutinefunction(method):
                                await method(task, chat)
                            else:
                                left_s = _seconds_for_plain_code(until_s)
                                await kit.plain.run(name, task, chat, left_s)
                        except Exception as error:
                            # user code may raise anything, also a stop in a group of exceptions
                            stop = stop_in(error)
                            if not stop:
                                raise
                            live.stopped_by = live.stopped_by or stop
    except asyncio.CancelledError as error:
        return failed(error, "env")
    except BaseException as error:  # of user code
        if deadline.expired() or isinstance(error, LaneTimeout):
            return too_late(error, limit_s)
        return failed(error, "env")
    if not live.num_turns and live.overrun:
        return Failed("env", f"the first prompt has {live.overrun}")
    if not live.num_turns:
        return Failed("env", "rollout() never spoke to the policy")
    return chat


def _seconds_for_plain_code(until_s: float) -> float:
    left_s = max(0.0, until_s - time.monotonic())
    return left_s - min(PLAIN_MARGIN_S, left_s / 10)


def _open_chat(kit: Kit, live: LiveRollout, toolsets: tuple[Toolset, ...]) -> Chat:
    env, task = kit.env, live.run.task

    def stop_reason(chat: Chat) -> str:
        """A stop condition says more than a limit, so it is asked first. Children have limits only."""
        if chat.replies and not chat.is_child:
            for name in hooks(type(env), "stop"):
                if getattr(env, name)(task, chat):
                    return name
        return live.limit_reached(env)

    speaker, toolbox = kit.speakers.speaker_for(live), _toolbox(kit, live, toolsets)
    return Chat(speaker, toolbox, stop_reason, system_prompt=env.system_prompt)


def _toolbox(kit: Kit, live: LiveRollout, toolsets: tuple[Toolset, ...]) -> Toolbox:
    task, deadline_s = live.run.task, kit.config.tool_deadline_s

    async def call_plain(name: str, arguments: dict[str, object]) -> object:
        return await kit.plain.call_tool(task, name, arguments, deadline_s)

    return Toolbox(toolsets, call_plain, deadline_s, live.within)


class RolloutEnd(Struct, frozen=True):
    """A rollout's outcome, and the raw frame with its columns if they travel beside it."""

    outcome: Outcome
    frame: memoryview | None = None


async def commit(
    kit: Kit, live: LiveRollout, finished: Finished, store: PayloadStore
) -> RolloutEnd:
    """Write the rollout's columns, and only then return that it is scored."""
    live.enter("committing")
    rows = await run_in_slices(live.trace.finish_in_slices())
    try:
        columns = row_columns(row.columns() for row in rows)
        text = await run_in_slices(transcript(finished.rollout.messages))
        summaries = await run_in_slices(_summaries(rows))
        # nothing may be awaited from here on: a ref that is sent after one in a newer segment is lost
        stored = await store.store({**columns, TEXT: text}, live.spool)
    except PayloadError as error:
        return RolloutEnd(Failed("worker", str(error)))
    except UnicodeEncodeError as error:
        return RolloutEnd(Failed("env", f"a message holds text that is not Unicode: {error}"))
    kind = type(kit.env)
    rewards, metrics = split_scores(kind, finished.scores)
    scored = Scored(
        reward=total(kind, rewards),
        rewards=rewards,
        metrics=metrics,
        rows=summaries,
        ref=stored.ref,
        num_turns=finished.rollout.num_turns,
        stop=finished.rollout.stop,
        first_version=PolicyVersion(min(live.versions)),
        last_version=PolicyVersion(max(live.versions)),
        timing=replace(finished.timing, queue_s=live.run.queued_s),
        num_sampled=live.num_tokens,
        engines=tuple(live.engines),
    )
    return RolloutEnd(scored, stored.frame)


def _summaries(rows: tuple[Row, ...]) -> Generator[None, None, tuple[RowSummary, ...]]:
    summaries = []
    for row in rows:
        summaries.append(row.summary())
        yield
    return tuple(summaries)
