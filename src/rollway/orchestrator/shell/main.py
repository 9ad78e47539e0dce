"""The orchestrator's process: connects sources, core and performer, and drives them."""

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from ...config.plan import env_name
from ...config.specs import EnvAddress, OrchestratorSpec, ServerLimits
from ...config.terms import disagreements
from ...envserver import client as env_client
from ...errors import ProtocolError
from ...ledger.ledger import open_ledger
from ...loop.lanes.threads import thread
from ...loop.processes.part import Parent, run_part, unchanged
from ...observe.health import Lags
from ...observe.report import Notice, RunProgress
from ...observe.upkeep import DiskWatch, Upkeep
from ...payload.reuse import remove_segments, remove_spares
from ...payload.writer import SegmentWriter
from ...records.ids import PolicyVersion
from ...records.lag import ProcessStats
from ...records.payload import SegmentName
from ...records.task import Split
from ...records.turn import Sampling
from ...rundir.rundir import RunDir, write_whole
from ...transport.open import open_sender
from ...wire.keys import read_client_keys
from ..core.core import Core
from ..core.events import Started, Tick
from ..core.state import needs_engine
from .advantage import credit_lane
from .bookkeeper import Bookkeeper
from .fleet import LOOK_EVERY_S, open_fleet
from .perform import Peers, Performer
from .sources import Events, from_engines, from_env, from_parent, from_trainer, settle
from .step_log import StepLog
from .tracker import RolloutTracker

MAX_EVENTS = 10_000
PROGRESS_EVERY_S = 0.25
SAY_EVERY_S = 10.0


async def drive(core: Core, events: Events, performer: Performer, steps: StepLog) -> None:
    """Feed events to the core and carry out its commands, until the core has finished."""
    async with asyncio.TaskGroup() as tasks:
        while not core.finished:
            commands = core.on_event(await events.get())
            if core.shipping.ready.is_full:
                steps.phases.note_full()
            for command in commands:
                tasks.create_task(performer.perform(command), name=type(command).__name__)


async def orchestrator(spec: OrchestratorSpec, parent: Parent) -> None:
    """Run one run's rollouts, from the first task to the last batch."""
    run, lags = RunDir(spec.run_dir), Lags()
    events: Events = asyncio.Queue(MAX_EVENTS)
    core = Core(spec.core, spec.first_step, spec.restored.cursors)

    async def on_stats(stats: ProcessStats) -> None:
        lags.add(stats)
        await parent.report_stats(stats)

    async with AsyncExitStack() as stack:
        upkeep = Upkeep(lambda text: parent.send(Notice(text)))
        await stack.enter_async_context(_removing_unused_payload(run, core, upkeep))
        peers = await _connect(spec, core, parent, stack)
        ledger = await stack.enter_async_context(open_ledger(run.ledger, upkeep.failed))
        tracker = RolloutTracker(core.view, peers.fleet.states)
        config = spec.core.orchestrator
        steps = StepLog(run, parent, lags, core.view, config.correct_at, upkeep)
        books = Bookkeeper(run, ledger, tracker, steps, config, upkeep)
        first_version = PolicyVersion(spec.first_step - 1)
        on_unsent = partial(settle, events, books, parent)
        performer = Performer(
            peers, books, events, _samplings(spec), first_version, on_unsent
        )
        peers.fleet.listen(tracker.unsettled, performer.send_policy)
        stack.push_async_callback(_write_last, run, tracker, steps, upkeep)  # however it ends
        await performer.send_policy()
        parent.in_flight, parent.on_stats = lambda: core.num_in_flight, on_stats
        clients, trainer = peers.clients.items(), peers.trainer
        await parent.report_ready(trainer.address)
        async with asyncio.TaskGroup() as tasks:
            sources = [
                *(
                    from_env(env, client, events, books, parent, peers.fleet)
                    for env, client in clients
                ),
                trainer.serve(),
                from_engines(peers.fleet, events),
                peers.fleet.watch(),
                _report_progress(core, parent),
                _look_out(run, tracker, events, parent, upkeep),
            ]
            running = [tasks.create_task(source) for source in sources]
            driving = tasks.create_task(drive(core, events, performer, steps))
            listening = tasks.create_task(from_parent(parent, lags))
            await performer.resume(spec.restored)
            whole_groups = frozenset(env for env, client in clients if client.whole_groups)
            await events.put(Started(spec.restored, whole_groups))
            # a trainer may publish batches of before a restart at once, so the core learns of them first
            all_steps = range(spec.first_step, spec.core.max_steps + 1)
            versions = from_trainer(trainer, all_steps, events, books, peers.fleet)
            running.append(tasks.create_task(versions))
            await asyncio.wait([driving, listening], return_when=asyncio.FIRST_COMPLETED)
            for task in (*running, driving, listening):
                task.cancel()


@asynccontextmanager
async def _removing_unused_payload(
    run: RunDir, core: Core, upkeep: Upkeep
) -> AsyncIterator[None]:
    """Give the space of unused segments back when the block ends, also if it is cancelled or fails."""
    try:
        yield
    finally:
        is_complete = core.view().is_finished
        remove = remove_segments if is_complete else remove_spares
        await upkeep.attempt("Removing unused payload", remove, run.payload)


async def _connect(
    spec: OrchestratorSpec, core: Core, parent: Parent, stack: AsyncExitStack
) -> Peers:
    """Connect to engines, env servers and trainer, and start the process for advantages."""
    run, config, enter = RunDir(spec.run_dir), spec.core, stack.enter_async_context
    fleet = await enter(
        open_fleet(spec, lambda text: parent.send(Notice(text)), lambda: needs_engine(core))
    )
    clients = {env.id: await _connect_env(spec, env, parent, stack) for env in spec.envs}
    credit = await enter(
        credit_lane(config.orchestrator, parent.watch, config.max_outstanding)
    )
    sender = open_sender(run, spec.transport, spec.first_step, config.max_steps)
    return Peers(clients, fleet, stack.enter_context(sender), credit)


async def _say_that_it_waits(env: EnvAddress, parent: Parent) -> None:
    """Say now and then that an env server has not answered yet."""
    for waited_s in itertools.count(SAY_EVERY_S, SAY_EVERY_S):
        await asyncio.sleep(SAY_EVERY_S)
        name, limit_s = env_name(env.id), env_client.HELLO_DEADLINE_S
        text = f"Waiting for the env server of '{name}' at {env.address} ({waited_s:g} of {limit_s:g} s)"
        if env.terms:
            text += f"; 'rollway serve run.toml --env {name}' starts it"
        await parent.send(Notice(text))


async def _connect_env(
    spec: OrchestratorSpec, env: EnvAddress, parent: Parent, stack: AsyncExitStack
) -> env_client.EnvClient:
    """Connect to an env server, which must serve the right environment. What it sends as frames lands in
    segments of this process."""
    keys = read_client_keys(Path(env.keys)) if env.keys else None
    first = SegmentName(f"{env_name(env.id)}.in", 0, generation=spec.generation)
    folder, segment_bytes = RunDir(spec.run_dir).payload, ServerLimits().segment_mb << 20
    landing = SegmentWriter(folder, first, segment_bytes, spec.payload.durability)
    stack.enter_context(landing)
    connecting = env_client.connect(env.address, landing, keys, must_land=env.needs_frames)
    waiting = asyncio.create_task(_say_that_it_waits(env, parent))
    try:
        client = await stack.enter_async_context(connecting)
    finally:
        waiting.cancel()
    if env_name(client.env) != env_name(env.id):
        raise ProtocolError(
            f"the server at {env.address} serves '{client.env}', but the run wants '{env.id}': "
            "correct the address or the id"
        )
    if differences := disagreements(env.terms, client.terms):
        raise ProtocolError(
            f"the server of '{env_name(env.id)}' at {env.address} and the run disagree: "
            f"{'; '.join(differences)}. Serve the environment from the same run file ('rollway serve "
            "run.toml --env NAME'), or correct one of the two"
        )
    return client


def _samplings(spec: OrchestratorSpec) -> dict[Split, Sampling]:
    train, config = spec.sampling, spec.core.eval
    if config is None:
        return {"train": train}
    max_tokens = config.max_tokens or train.max_tokens
    return {"train": train, "eval": Sampling(max_tokens, config.temperature)}


async def _report_progress(core: Core, parent: Parent) -> None:
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        await parent.send_if_idle(RunProgress(core.view()))


async def _write_situation(run: RunDir, tracker: RolloutTracker, upkeep: Upkeep) -> None:
    """Write the picture that `rollway why` reads."""
    picture = msgspec.json.encode(tracker.situation())
    await upkeep.attempt("Writing now.json", write_whole, run.now, picture)


async def _write_last(
    run: RunDir, tracker: RolloutTracker, steps: StepLog, upkeep: Upkeep
) -> None:
    await steps.finish()
    await _write_situation(run, tracker, upkeep)


async def _look_out(
    run: RunDir, tracker: RolloutTracker, events: Events, parent: Parent, upkeep: Upkeep
) -> None:
    """Keep that picture up to date, look at the disks, and say what the run waits for when a step takes
    long."""
    disks = DiskWatch((run.path, run.payload), lambda text: parent.send(Notice(text)))
    place = await thread(run.identify)
    while True:
        await _write_situation(run, tracker, upkeep)
        await asyncio.sleep(LOOK_EVERY_S)
        await upkeep.attempt("Looking for the ledger", run.check_ledger)
        if await thread(run.identify) not in (place, None):
            raise run.removed()
        await events.put(Tick(time.monotonic(), await disks.look()))
        if remark := tracker.remark():
            await parent.send(Notice(remark))


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, OrchestratorSpec, unchanged, orchestrator)
