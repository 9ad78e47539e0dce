"""A worker process: runs rollouts of one environment, up to `concurrency` at a time."""

import asyncio
import faulthandler
import logging
import resource
import socket
from contextlib import AsyncExitStack

import msgspec
import zmq
from zmq.asyncio import Context, Socket

from ...config.specs import WorkerSpec
from ...envs.background_tasks import keep_track
from ...envs.environment import needs_whole_groups
from ...envs.in_lane import take_tasks
from ...errors import CodeRefused, DatasetError, LaneError, LaneRaised, ProtocolError
from ...loop.bounded_code import BoundedCode
from ...loop.coroutines import FairLoop, run_until_first
from ...loop.lanes.lanes import ProcessLane
from ...loop.processes.child import end_at_once
from ...loop.processes.part import Parent, run_part
from ...loop.processes.running_code import RunningCodePage, owned_by
from ...loop.watch.rarely import Rarely
from ...payload.store import PayloadStore
from ...records.ids import RolloutId, WorkerName
from ...records.lag import ProcessStats
from ...records.rollout import Boundary, Cancelled, Failed, Settled
from ...records.text import sendable
from ...wire.messages import (
    MAX_REASON,
    Cancel,
    Drain,
    Drained,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    ReplaceMe,
    RolloutPhases,
    Run,
    RunGroup,
    ServerStats,
    Tasks,
    ToWorker,
    encode,
    for_worker,
    unread_runs,
)
from ..failures import FailureLog
from .group import LiveGroup
from .kit import Kit, Prepared, open_kit, open_store, prepare
from .live_rollout import LiveRollout, progress
from .rollout import RolloutEnd, commit, play
from .worker_log import WorkerLog

log = logging.getLogger(__name__)

UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What encoding a record raises if it holds what no message can: a lone surrogate, a huge number."""
TASKS_DEADLINE_S = 300.0
LINGER_MS = 2000
"""How long a drained worker waits for its last messages to leave."""


class Worker:
    """Answers the router. Every Run ends in exactly one Settled, also when it is cancelled."""

    def __init__(
        self, prepared: Prepared, wire: Socket, kit: Kit, tasks_lane: ProcessLane,
        store: PayloadStore,
    ) -> None:  # fmt: skip
        self._name = WorkerName(prepared.part.name)
        self._spec = prepared.spec
        self._policies = prepared.policies
        self._wire = wire
        self._kit = kit
        self._tasks_lane = tasks_lane
        self._store = store
        self._running: dict[RolloutId, LiveRollout] = {}
        self._num_task_requests = 0
        """Requests for tasks that are not answered yet."""
        self._is_draining = False
        self._finished = asyncio.Event()
        self.left_code_at = ""
        """Where code waits that refused to end; empty if no rollout has left any."""
        self._failures = FailureLog()
        self._log = WorkerLog(prepared.part.place)
        self._unread = Rarely()
        self._file_limit = _file_limit()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def serve(self) -> None:
        """Take messages until the router says Drain and everything taken is finished."""
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(self._receive(tasks))
            await self._finished.wait()
            receiving.cancel()
        self._wire.setsockopt(zmq.LINGER, LINGER_MS)
        await self.send(Drained())

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        fair = FairLoop()
        while True:
            await fair.breathe()
            frame = await self._wire.recv()
            try:
                message = for_worker(frame)
            except ProtocolError as error:
                await self._fail_unread(frame, str(error))
                continue
            self._on(message, tasks)

    def _on(self, message: ToWorker, tasks: asyncio.TaskGroup) -> None:
        match message:
            case Run() as run:
                self._begin(run, tasks)
            case RunGroup() as together:
                runs = together.runs
                members = frozenset(run.rollout_id for run in runs)
                group = LiveGroup(runs[0].task, members, self._kit.scoring)
                for run in runs:
                    self._begin(run, tasks, group)
            case Cancel(rollout_id, reason):
                if (live := self._running.get(rollout_id)) is not None:
                    live.cancel(reason)
            case NextTasks() as request:
                self._num_task_requests += 1
                tasks.create_task(self._send_tasks(request))
            case NewPolicy(version, refused, client):
                policy = self._policies.of(client)
                policy.version = version
                policy.refuse(refused)
            case FrameTaken(num_bytes=num_bytes):
                self._store.taken(num_bytes)
            case Drain():
                self._is_draining = True
                self._finish_if_drained()

    def _begin(
        self, run: Run, tasks: asyncio.TaskGroup, group: LiveGroup | None = None
    ) -> None:
        live = self._running[run.rollout_id] = LiveRollout(run, self._store.new_spool())
        tasks.create_task(self._run(live, group), name=run.rollout_id)

    def _finish_if_drained(self) -> None:
        if self._is_draining and not self._running and not self._num_task_requests:
            self._finished.set()

    async def _fail_unread(self, frame: bytes, error: str) -> None:
        """Settle the rollouts of a message that cannot be read: their task may hold anything."""
        if self._unread.add():
            log.warning("message %d that cannot be read: %s", self._unread.count, error)
        for rollout_id, attempt in unread_runs(frame):
            failed = Failed("env", f"its task cannot be read: {error}")
            await self.send(Settled(rollout_id, attempt, self._name, failed))

    async def _run(self, live: LiveRollout, group: LiveGroup | None) -> None:
        """Run one rollout and send its end. A cancellation that the router asked for is an end too. Then
        forget the rollout, and let its group wait no longer for it."""
        policy = self._policies.of(live.run.client)
        policy.version = max(policy.version, live.run.version)
        end = None
        try:
            try:
                if live.cancel_reason is None:
                    end = await self._play_and_commit(live, group)
            except asyncio.CancelledError:
                if live.cancel_reason is None:
                    raise
            finally:
                # a cancel comes too late now: the end must reach the router
                live.cancel_running = None
            if live.code is not None and live.code.left_code_at:
                await self._ask_for_replacement(live.run.rollout_id, live.code.left_code_at)
            await self._settle(
                live.run, end or RolloutEnd(Cancelled(live.cancel_reason or ""))
            )
        finally:
            if group is not None:
                group.leave(live.run.rollout_id)
            if live.spool is not None:
                await live.spool.discard()
            del self._running[live.run.rollout_id]
            self._finish_if_drained()

    async def _play_and_commit(
        self, live: LiveRollout, group: LiveGroup | None
    ) -> RolloutEnd:
        # only user code has this context: our own code for one rollout may die of what another did
        context, playing = owned_by(live.run.serial), play(self._kit, live, group)
        code = BoundedCode(playing, name=live.run.rollout_id, context=context)
        live.code = code
        live.cancel_running = code.cancel
        try:
            played = await code.wait()
        except CodeRefused as error:
            if live.cancel_reason is not None:
                return RolloutEnd(Cancelled(live.cancel_reason))
            boundary: Boundary = "scorer" if live.phase == "scoring" else "deadline"
            return RolloutEnd(Failed(boundary, error.problem, where=error.where))
        finally:
            code.cancel()  # if this task is cancelled, the code is too
        if isinstance(played, Failed):
            return RolloutEnd(played)
        committing = asyncio.current_task()
        live.cancel_running = committing.cancel if committing else None
        return await commit(self._kit, live, played, self._store)

    async def _ask_for_replacement(self, rollout_id: RolloutId, where: str) -> None:
        """Ask to be given no more rollouts: code that was left behind may run and grow forever."""
        if not self.left_code_at:
            self.left_code_at = where
            reason = f"code of {rollout_id} refuses to end, at {where}"
            log.warning("%s: this worker takes no more rollouts", reason)
            await self.send(ReplaceMe(sendable(reason)[:MAX_REASON]))

    async def _settle(self, run: Run, end: RolloutEnd) -> None:
        self._check_file_limit()
        if isinstance(end.outcome, Failed):
            origin = (
                f"environment '{self._spec.id}', task '{run.task.id}', attempt {run.attempt}"
            )
            self._failures.add(run.rollout_id, end.outcome, origin)
        head = run.rollout_id, run.attempt, self._name
        try:
            settled = encode(Settled(*head, end.outcome))
        except UNSENDABLE as error:
            text = f"its record cannot be sent: {type(error).__name__}: {error}"
            end = RolloutEnd(Failed("env", sendable(text)))
            settled = encode(Settled(*head, end.outcome))
        if end.frame is None:
            await self._wire.send(settled)
        else:
            await self._wire.send_multipart([settled, end.frame], copy=False)

    def _check_file_limit(self) -> None:
        """End this worker if user code has lowered its limit of open files. Every rollout may fail then,
        so this one's end is not sent. The router finds the one at fault: each worker it runs in ends."""
        if (limit := _file_limit()) < self._file_limit:
            log.error(
                "code of a rollout lowered RLIMIT_NOFILE to %d, so this worker ends: limit resources "
                "in processes that your code starts", limit,
            )  # fmt: skip
            end_at_once(1)

    async def _send_tasks(self, request: NextTasks) -> None:
        """Send tasks. The environment's `tasks()` may block, so it runs in a separate process."""
        start, count, split = request.start, request.count, request.split
        try:
            tasks = await self._tasks_lane.call(
                take_tasks, self._spec, start, count, split, deadline_s=TASKS_DEADLINE_S
            )
        except LaneError as error:
            answer = Tasks(start, (), error=_explain_tasks(error), split=split)
        else:
            answer = Tasks(start, tasks, exhausted=len(tasks) < count, split=split)
        try:
            frame = encode(answer)
        except UNSENDABLE:
            frame = encode(_name_unsendable(answer))
        await self._wire.send(frame)
        self._num_task_requests -= 1
        self._finish_if_drained()

    async def send_stats(self, stats: ProcessStats) -> None:
        """Send statistics once a second, which also renews this worker's lease. They go over the wire
        instead of to the parent process, so that remote clients get them too."""
        self._log.add(stats)
        await self.send(ServerStats(stats))
        if self._running:
            await self.send(RolloutPhases(self._name, progress(self._running.values())))

    async def send(self, message: msgspec.Struct) -> None:
        await self._wire.send(encode(message))


def _file_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _name_unsendable(answer: Tasks) -> Tasks:
    """Return an answer that names the first task which cannot be encoded."""
    why = "they cannot be sent"
    for position, task in enumerate(answer.tasks, answer.start):
        try:
            encode(task)
        except UNSENDABLE as error:
            why = f"task {position} cannot be sent: {type(error).__name__}: {error}"
            break
    return Tasks(answer.start, (), error=sendable(why), split=answer.split)


def _explain_tasks(error: LaneError) -> str:
    """Return why no tasks came, in one line. The traceback goes to the log of this process."""
    if not isinstance(error, LaneRaised):
        return sendable(str(error))
    log.error("tasks() raised\n%s", error.traceback)
    text = error.text if error.kind == DatasetError.__name__ else str(error)
    return sendable(f"{text}, at {error.where}" if error.where else text)


async def worker(prepared: Prepared, parent: Parent) -> None:
    """Open what rollouts need, say Hello, and serve until drained or until the router is gone."""
    part, watch, loop = prepared.part, parent.watch, asyncio.get_running_loop()
    faulthandler.enable()
    # the router can read this page even after this process has died
    board = RunningCodePage(part.board_fd)
    board.mark_tasks_of(loop)
    watch.show_holds(board.show_line)
    keep_track(loop)
    tasks_lane = ProcessLane(f"{part.name}.tasks", 1, label="task source", watch=watch)
    async with tasks_lane, open_kit(prepared, watch) as kit, AsyncExitStack() as stack:
        store = stack.enter_context(open_store(part))
        context = stack.enter_context(Context())
        wire = stack.enter_context(context.socket(zmq.DEALER))
        wire.setsockopt(zmq.IDENTITY, part.name.encode())
        wire.setsockopt(zmq.LINGER, 0)
        # no limit: credits bound it, and a send that waits could be cancelled halfway
        wire.setsockopt(zmq.SNDHWM, 0)
        wire.connect(part.address)
        serving = Worker(prepared, wire, kit, tasks_lane, store)
        parent.in_flight, parent.on_stats = lambda: serving.in_flight, serving.send_stats
        credits = part.server.env.local.concurrency
        whole_groups = needs_whole_groups(prepared.env)
        await serving.send(Hello(part.name, credits, whole_groups=whole_groups))
        await parent.report_ready()
        await run_until_first(serving.serve(), parent.wait_until_gone())
    if serving.left_code_at:
        log.info("ending at once, without the code at %s", serving.left_code_at)
        end_at_once()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, WorkerSpec, prepare, worker)
