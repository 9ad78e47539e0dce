"""A worker: runs rollouts of one environment, as many at a time as it has credits."""

import asyncio
import faulthandler
import logging
import socket
from contextlib import AsyncExitStack

import msgspec
import zmq
import zmq.asyncio

from ...config.specs import WorkerSpec
from ...envs.background_tasks import keep_track
from ...envs.environment import needs_whole_groups
from ...envs.in_lane import EnvSpec, take_tasks
from ...errors import LaneError, ProtocolError
from ...loop.coroutines import FairLoop
from ...loop.lanes.lanes import ProcessLane
from ...loop.processes.part import Parent, run_part
from ...loop.processes.running_code import RunningCodePage, owned_by
from ...loop.watch.rarely import Rarely
from ...payload.store import PayloadStore
from ...records.ids import RolloutId, WorkerName
from ...records.lag import ProcessStats
from ...records.rollout import Cancelled, Failed, Outcome, Scored, Settled
from ...wire.messages import (
    Cancel,
    Drain,
    Drained,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Run,
    RunGroup,
    ServerStats,
    Tasks,
    ToWorker,
    WorkerProgress,
    encode,
    for_worker,
    unread_runs,
)
from ..core.open_runs import serial_of
from ..failures import FailureLog
from .group import LiveGroup
from .kit import Prepared, open_runner, open_store, prepare
from .rollout import RolloutRunner
from .speakers import SpeakerFactory, open_policy
from .track import Track, progress
from .worker_log import WorkerLog

log = logging.getLogger(__name__)

TASKS_DEADLINE_S = 300.0
LAST_WORDS_MS = 2000
"""How long what a drained worker said last may take to leave."""


class _Running:
    """A rollout in this worker: its coroutine once that has begun, and why it is cancelled, if it is."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.cancelled: str | None = None
        self.track = Track()


class Worker:
    """Answers the router. Every Run ends in one Settled, also when it is cancelled."""

    def __init__(
        self, name: WorkerName, wire: zmq.asyncio.Socket, runner: RolloutRunner, spec: EnvSpec,
        policy: SpeakerFactory, tasks_lane: ProcessLane, store: PayloadStore,
    ) -> None:  # fmt: skip
        self._name = name
        self._wire = wire
        self._runner = runner
        self._spec = spec
        self._policy = policy
        self._tasks_lane = tasks_lane
        self._store = store
        self._running: dict[RolloutId, _Running] = {}
        self._num_asked = 0
        """For tasks, and not answered yet."""
        self._is_draining = False
        self._finished = asyncio.Event()
        self._failures = FailureLog()
        self._pulse = WorkerLog(name)
        self._unread = Rarely()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def serve(self) -> None:
        """Take messages until told to drain and everything taken is finished."""
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(self._take(tasks))
            await self._finished.wait()
            taking.cancel()
        self._wire.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        await self.send(Drained())

    async def _take(self, tasks: asyncio.TaskGroup) -> None:
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
            case RunGroup(runs=runs):
                group = self._runner.group_of(runs)
                for run in runs:
                    self._begin(run, tasks, group)
            case Cancel(rollout_id=id, reason=reason):
                self._cancel(id, reason)
            case NextTasks() as wanted:
                self._num_asked += 1
                tasks.create_task(self._send_tasks(wanted))
            case NewPolicy(version=version):
                self._policy.version = version
            case FrameTaken(num_bytes=num_bytes):
                self._store.taken(num_bytes)
            case Drain():
                self._is_draining = True
                self._look_whether_finished()

    def _begin(self, run: Run, tasks: asyncio.TaskGroup, group: LiveGroup | None = None) -> None:
        id = run.rollout_id
        self._running[id] = _Running()
        tasks.create_task(self._run(run, group), name=id, context=owned_by(serial_of(id)))

    def _look_whether_finished(self) -> None:
        if self._is_draining and not self._running and not self._num_asked:
            self._finished.set()

    async def _fail_unread(self, frame: bytes, error: str) -> None:
        """A task may hold what cannot be read here; its rollouts settle all the same."""
        if self._unread.add():
            log.warning("message %d that cannot be read: %s", self._unread.count, error)
        for id, attempt in unread_runs(frame):
            failed = Failed("env", f"its task cannot be read: {error}")
            await self.send(Settled(id, attempt, self._name, failed))

    def _cancel(self, id: RolloutId, reason: str) -> None:
        """Reaches the coroutine if it has begun; if not, it will find the reason when it does."""
        running = self._running.get(id)
        if running is not None:
            running.cancelled = reason
            if running.task is not None:
                running.task.cancel()

    async def _run(self, run: Run, group: LiveGroup | None) -> None:
        self._policy.version = max(self._policy.version, run.version)
        mine = self._running[run.rollout_id]
        try:
            await self._settle(run, await self._outcome(run, mine, group))
        finally:
            if group is not None:
                group.leave(run.rollout_id)
            del self._running[run.rollout_id]
            self._look_whether_finished()

    async def _outcome(self, run: Run, mine: _Running, group: LiveGroup | None) -> Outcome:
        """How it ends; cancellation that was asked for is an end like others."""
        try:
            if mine.cancelled is None:
                mine.task = asyncio.current_task()
                return await self._runner.run(run, mine.track, group)
        except asyncio.CancelledError:
            if mine.cancelled is None:
                raise
        finally:
            mine.task = None  # from here on a cancel comes too late: the end must reach the router
        assert mine.cancelled is not None
        return Cancelled(mine.cancelled)

    async def _settle(self, run: Run, outcome: Outcome) -> None:
        if isinstance(outcome, Failed):
            whose = f"environment '{self._spec.id}', task '{run.task.id}', attempt {run.attempt}"
            self._failures.add(run.rollout_id, outcome, whose)
        settled = encode(Settled(run.rollout_id, run.attempt, self._name, outcome))
        frame = self._store.frame_of(outcome.ref) if isinstance(outcome, Scored) else None
        if frame is None:
            await self._wire.send(settled)
        else:
            await self._wire.send_multipart([settled, frame], copy=False)

    async def _send_tasks(self, wanted: NextTasks) -> None:
        """The environment's tasks come from a process of their own: `tasks()` may block."""
        try:
            tasks = await self._tasks_lane.call(
                take_tasks, self._spec, wanted.start, wanted.count, wanted.split,
                deadline_s=TASKS_DEADLINE_S,
            )  # fmt: skip
        except LaneError as error:
            answer = Tasks(wanted.start, (), error=str(error), split=wanted.split)
        else:
            exhausted = len(tasks) < wanted.count
            answer = Tasks(wanted.start, tasks, exhausted=exhausted, split=wanted.split)
        await self.send(answer)
        self._num_asked -= 1
        self._look_whether_finished()

    async def send_stats(self, stats: ProcessStats) -> None:
        """Once a second, which also renews this worker's lease. Workers speak of themselves on the
        wire, so that remote clients hear it too."""
        self._pulse.beat(stats)
        await self.send(ServerStats(stats))
        if self._running:
            tracks = ((id, one.track) for id, one in self._running.items())
            await self.send(WorkerProgress(self._name, progress(tracks)))

    async def send(self, message: msgspec.Struct) -> None:
        await self._wire.send(encode(message))


async def worker(prepared: Prepared, parent: Parent) -> None:
    """Open what rollouts need, say Hello, serve until the router is gone."""
    part, server = prepared.part, prepared.part.server
    name = WorkerName(part.name)
    faulthandler.enable()
    show_who_runs(part.board_fd, parent)
    keep_track(asyncio.get_running_loop())
    async with AsyncExitStack() as stack:
        tasks_lane = await stack.enter_async_context(
            ProcessLane(f"{name}.tasks", size=1, label="task source", watch=parent.watch)
        )
        policy = await stack.enter_async_context(
            open_policy(name, server, prepared.speech, parent.watch, is_patient=part.is_patient)
        )
        store = stack.enter_context(open_store(server, name))
        runner = await open_runner(prepared, parent.watch, policy, store, stack)
        context = stack.enter_context(zmq.asyncio.Context())
        wire = stack.enter_context(context.socket(zmq.DEALER))
        wire.setsockopt(zmq.IDENTITY, name.encode())
        wire.setsockopt(zmq.LINGER, 0)
        wire.setsockopt(zmq.SNDHWM, 0)  # credits bound it; a send that waits could be cancelled half way
        wire.connect(part.address)
        me = Worker(name, wire, runner, prepared.spec, policy, tasks_lane, store)
        parent.in_flight, parent.on_stats = lambda: me.in_flight, me.send_stats
        whole_groups = needs_whole_groups(prepared.env)
        await me.send(Hello(name, server.env.local.concurrency, whole_groups=whole_groups))
        await parent.report_ready()
        await _until_finished(me, parent)


def show_who_runs(board_fd: int, parent: Parent) -> None:
    """From now on the router sees, even after this process has died, whose code was running."""
    page = RunningCodePage(board_fd)
    page.mark_tasks_of(asyncio.get_running_loop())
    parent.watch.show_holds(page.show_line)


async def _until_finished(me: Worker, parent: Parent) -> None:
    """Drained, or the parent is gone."""
    async with asyncio.TaskGroup() as tasks:
        serving, gone = tasks.create_task(me.serve()), tasks.create_task(parent.wait_until_gone())
        await asyncio.wait([serving, gone], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        gone.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, WorkerSpec, prepare, worker)
