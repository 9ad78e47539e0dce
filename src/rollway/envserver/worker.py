"""A worker: runs rollouts of one environment, as many at a time as it has credits."""

import asyncio
import logging
import socket
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from ..config.parts import RouterPart, WorkerPart
from ..envs.environment import Environment
from ..envs.source import EnvSpec, load_shared, take_tasks
from ..errors import LaneError, ProtocolError
from ..inference import engine as engines
from ..inference.longreply import LongReplies
from ..inference.rendering import Renderer, Rendering
from ..inference.routes import RouteShape, route_shape
from ..loop.lanes import ProcessLane
from ..loop.part import Parent, run_part
from ..loop.seldom import is_news
from ..payload.frames import FrameStore
from ..payload.store import PayloadStore
from ..payload.writer import SegmentWriter
from ..records.ids import RolloutId, WorkerName
from ..records.lag import ProcessStats
from ..records.rollout import Cancelled, Failed, Outcome, Scored, Settled
from ..wire.messages import (
    Cancel,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Run,
    Stats,
    Tasks,
    encode,
    for_worker,
    unread_runs,
)
from .rollout import RolloutRunner

log = logging.getLogger(__name__)

TASKS_DEADLINE_S = 300.0


class Worker:
    """Answers the router. Every Run ends in one Settled, also when it is cancelled."""

    def __init__(
        self, name: WorkerName, wire: zmq.asyncio.Socket, runner: RolloutRunner, spec: EnvSpec,
        engine: engines.Engine, tasks_lane: ProcessLane, store: PayloadStore,
    ) -> None:  # fmt: skip
        self._name = name
        self._wire = wire
        self._runner = runner
        self._spec = spec
        self._engine = engine
        self._tasks_lane = tasks_lane
        self._store = store
        self._running: dict[RolloutId, asyncio.Task[None] | None] = {}
        self._why_cancelled: dict[RolloutId, str] = {}
        self._num_unread = 0

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def serve(self) -> None:
        """Take messages until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                frame = await self._wire.recv()
                try:
                    message = for_worker(frame)
                except ProtocolError as error:
                    await self._fail_unread(frame, str(error))
                    continue
                match message:
                    case Run() as run:
                        self._running[run.rollout_id] = None
                        tasks.create_task(self._run(run), name=run.rollout_id)
                    case Cancel(rollout_id=id, reason=reason):
                        self._cancel(id, reason)
                    case NextTasks() as wanted:
                        tasks.create_task(self._send_tasks(wanted))
                    case NewPolicy(version=version):
                        self._engine.version = version
                    case FrameTaken(num_bytes=num_bytes):
                        self._store.taken(num_bytes)

    async def _fail_unread(self, frame: bytes, error: str) -> None:
        """A task may hold what cannot be read here; its rollouts settle all the same."""
        self._num_unread += 1
        if is_news(self._num_unread - 1, self._num_unread):
            log.warning("message %d that cannot be read: %s", self._num_unread, error)
        for id, attempt in unread_runs(frame):
            failed = Failed("env", f"its task cannot be read: {error}")
            await self.send(Settled(id, attempt, self._name, failed))

    def _cancel(self, id: RolloutId, reason: str) -> None:
        """Reaches the coroutine if it has begun; if not, it will find the reason when it does."""
        if id in self._running:
            self._why_cancelled[id] = reason
            if task := self._running[id]:
                task.cancel()

    async def _run(self, run: Run) -> None:
        id = run.rollout_id
        self._engine.version = max(self._engine.version, run.version)
        try:
            if id not in self._why_cancelled:
                self._running[id] = asyncio.current_task()
                await self._settle(run, await self._runner.run(run))
                return
        except asyncio.CancelledError:
            if id not in self._why_cancelled:
                raise
        finally:
            del self._running[id]
            reason = self._why_cancelled.pop(id, "")
        await self._settle(run, Cancelled(reason))

    async def _settle(self, run: Run, outcome: Outcome) -> None:
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
                take_tasks, self._spec, wanted.start, wanted.count, deadline_s=TASKS_DEADLINE_S
            )
        except LaneError as error:
            await self.send(Tasks(wanted.start, (), error=str(error)))
            return
        await self.send(Tasks(wanted.start, tasks, exhausted=len(tasks) < wanted.count))

    async def send_stats(self, stats: ProcessStats) -> None:
        """Workers speak of themselves on the wire, so that remote clients hear it too."""
        await self.send(Stats(stats))

    async def send(self, message: msgspec.Struct) -> None:
        await self._wire.send(encode(message))


class Prepared(msgspec.Struct, frozen=True):
    """What takes long to load, loaded: the environment and the model's renderer."""

    part: WorkerPart
    spec: EnvSpec
    env: Environment
    rendering: Rendering
    shape: RouteShape | None


def prepare(part: WorkerPart) -> Prepared:
    config = part.server.env
    spec = EnvSpec(config.id, msgspec.json.encode(config.args), part.server.seed)
    model = part.server.model
    return Prepared(part, spec, spec.build(), Rendering(model), route_shape(model.path))


async def worker(prepared: Prepared, parent: Parent) -> None:
    """Open what rollouts need, say Hello, serve until the router is gone."""
    part, spec = prepared.part, prepared.spec
    server, name = part.server, WorkerName(part.name)
    async with AsyncExitStack() as stack:
        lane = await stack.enter_async_context(
            ProcessLane(
                f"{name}.score", server.env.scoring_processes, warm=(load_shared, spec), what="reward",
                watch=parent.watch, max_waiting=server.env.concurrency,
            )
        )  # fmt: skip
        tasks_lane = await stack.enter_async_context(
            ProcessLane(f"{name}.tasks", size=1, what="task source", watch=parent.watch)
        )
        render_lane = await stack.enter_async_context(
            ProcessLane(
                f"{name}.render", size=1, what="rendering", watch=parent.watch,
                max_waiting=4 * server.env.concurrency,
            )
        )  # fmt: skip
        renderer = Renderer(prepared.rendering, server.model, render_lane)
        reply_lane = await stack.enter_async_context(
            ProcessLane(f"{name}.replies", size=1, what="reply", watch=parent.watch)
        )
        engine = await stack.enter_async_context(
            engines.connect(
                server.engine_url,
                routes=server.engine.routes,
                deadline_s=server.engine.request_deadline_s,
                shape=prepared.shape,
                long_replies=stack.enter_context(LongReplies(reply_lane)),
            )
        )
        store = stack.enter_context(open_store(server, name))
        runner = RolloutRunner(server.env, spec, prepared.env, engine, renderer, lane, store)
        context = stack.enter_context(zmq.asyncio.Context())
        wire = stack.enter_context(context.socket(zmq.DEALER))
        wire.setsockopt(zmq.IDENTITY, name.encode())
        wire.setsockopt(zmq.LINGER, 0)
        wire.setsockopt(zmq.SNDHWM, 0)  # credits bound it; a send that waits could be cancelled half way
        wire.connect(part.address)
        me = Worker(name, wire, runner, spec, engine, tasks_lane, store)
        parent.in_flight, parent.on_stats = lambda: me.in_flight, me.send_stats
        await me.send(Hello(name, server.env.concurrency))
        await parent.ready()
        await _until_parent_gone(me, parent)


def open_store(server: RouterPart, name: WorkerName) -> AbstractContextManager[PayloadStore]:
    """Where this worker's payload goes."""
    wants = server.payload
    if wants.store == "frames":
        return nullcontext(FrameStore(wants.frames_mb << 20))
    folder = Path(server.payload_dir)
    return SegmentWriter(folder, name, wants.segment_mb << 20, wants.durability)


async def _until_parent_gone(me: Worker, parent: Parent) -> None:
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(me.serve())
        while await parent.told() is not None:
            pass
        serving.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, WorkerPart, prepare, worker)
