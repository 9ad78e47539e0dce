"""The orchestrator's process: wires sources, core and performer, and drives them."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from ...config.plan import env_name
from ...config.specs import EnvAddress, OrchestratorSpec
from ...envserver import client as envs
from ...errors import ProtocolError
from ...ledger.ledger import open_ledger
from ...loop.lanes.lanes import thread
from ...loop.processes.part import Parent, as_it_is, run_part
from ...observe.health import Lags
from ...observe.report import Notice, RunProgress
from ...payload.reuse import drop_all, drop_spares
from ...payload.writer import SegmentWriter
from ...records.ids import PolicyVersion
from ...records.lag import ProcessStats
from ...records.task import Pool, Split
from ...records.turn import Sampling
from ...rundir.rundir import RunDir, write_whole
from ...transport.choose import open_shipping
from ...wire.keys import client_keys
from ...wire.messages import NewPolicy
from ..core.commands import Command, Dispatch
from ..core.core import Core
from ..core.events import Event, Started, Tick
from .advantage import credit_lane
from .fleet import open_fleet
from .limits import limits
from .perform import Performer, together
from .sources import Events, from_engines, from_env, from_parent, from_trainer
from .step_log import StepLog, StepPhases
from .tracker import RolloutTracker

MAX_EVENTS = 10_000
PROGRESS_EVERY_S = 0.25
LOOK_EVERY_S = 1.0


async def drive(
    core: Core, events: Events, phases: StepPhases,
    perform: Callable[[Command | tuple[Dispatch, ...]], Coroutine[Any, Any, None]],
) -> None:  # fmt: skip
    """Events in, commands out, until the core has finished."""
    async with asyncio.TaskGroup() as tasks:
        while not core.finished:
            event: Event = await events.get()
            commands = core.on_event(event)
            phases.look(core)
            for command in together(commands):
                tasks.create_task(perform(command), name=type(command).__name__)


async def orchestrator(part: OrchestratorSpec, parent: Parent) -> None:
    """One run's rollouts, from the first task to the last batch."""
    run, lags, phases = RunDir(part.run_dir), Lags(), StepPhases()
    events: Events = asyncio.Queue(MAX_EVENTS)
    ratios = {env.id: env.ratio for env in part.envs}
    core = Core(limits(part), ratios, part.first_step, part.restored.cursors)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ledger = await enter(open_ledger(run.ledger))
        fleet = await enter(
            open_fleet(
                part, lambda text: parent.say(Notice(text)), lambda: core.next_step <= part.max_steps
            )
        )
        clients = {
            env.id: await enter(connected(part, env, stack.enter_context(landing(run, part, env.id))))
            for env in part.envs
        }
        max_groups = part.max_outstanding
        credit = await enter(credit_lane(part.orchestrator, parent.watch, max_groups))
        lookout = RolloutTracker(core, fleet.states)
        steps = StepLog(run, parent, lags, lambda: gauges(core), phases, part.orchestrator.correct_at)
        shipping = stack.enter_context(
            open_shipping(run, part.transport, part.first_step, part.max_steps)
        )
        performer = Performer(
            run, clients, fleet, shipping, ledger, events, samplings(part), part.orchestrator, credit,
            phases, lookout, steps,
        )  # fmt: skip
        parent.in_flight, parent.on_stats = lambda: core.num_in_flight, tell_stats(parent, lags)
        await parent.ready(shipping.address)
        async with asyncio.TaskGroup() as tasks:
            sources = [
                *(from_env(id, one, events, performer, lags, parent) for id, one in clients.items()),
                shipping.serve(),
                from_trainer(shipping, part.first_step, part.max_steps, events, performer, steps),
                from_engines(fleet, events),
                fleet.watch(),
                tell_progress(core, parent),
                look_out(run, lookout, events, parent),
            ]
            running = [tasks.create_task(source) for source in sources]
            driving = tasks.create_task(drive(core, events, phases, performer.perform))
            listening = tasks.create_task(from_parent(parent, lags))
            await performer.resume(part.restored)
            whole = frozenset(id for id, one in clients.items() if one.whole_groups)
            await events.put(Started(part.restored, whole))
            await asyncio.wait([driving, listening], return_when=asyncio.FIRST_COMPLETED)
            for task in (*running, driving, listening):
                task.cancel()
        if core.finished:
            await draw(run, lookout)
        await thread(drop_all if core.finished else drop_spares, run.payload)


@asynccontextmanager
async def connected(
    part: OrchestratorSpec, env: EnvAddress, landing: SegmentWriter
) -> AsyncIterator[envs.EnvClient]:
    """A client of the environment's server, if it is that environment which is served there. A server
    that served other runs before is told where this one stands."""
    keys = client_keys(Path(env.keys)) if env.keys else None
    async with envs.connect(env.address, landing, keys, must_land=env.must_land) as client:
        if env_name(client.env) != env_name(env.id):
            raise ProtocolError(
                f"the server at {env.address} serves '{client.env}', the run wants '{env.id}'"
            )
        await client.send(NewPolicy(PolicyVersion(part.first_step - 1)))
        yield client


def landing(run: RunDir, part: OrchestratorSpec, env: str) -> SegmentWriter:
    """Where payload of workers that share no file system with this run is written."""
    wants = part.payload
    name = f"r{part.generation}.{env_name(env)}.in.0" if part.generation else f"{env_name(env)}.in.0"
    return SegmentWriter(run.payload, name, wants.segment_mb << 20, wants.durability)


def samplings(part: OrchestratorSpec) -> dict[Split, Sampling]:
    train, wants = part.sampling, part.eval
    return {"train": train, "eval": Sampling(wants.max_tokens or train.max_tokens, wants.temperature)}


def gauges(core: Core) -> dict[str, float]:
    pools: tuple[Pool, ...] = ("easy", "hard")
    return {
        **{
            f"pool/{env_name(env)}/{pool}": count
            for pool in pools
            for env, count in core.pooled(pool).items()
            if count
        },
        "in_flight": core.num_in_flight,
        "max_in_flight": core.max_in_flight,
        "retries": core.num_retries,
        "ready": core.num_ready,
        "payload/live_bytes": core.live_bytes,
        "payload/held_back": float(core.is_held_back),
    }


def tell_stats(parent: Parent, lags: Lags) -> Callable[[ProcessStats], Awaitable[None]]:
    async def tell(stats: ProcessStats) -> None:
        lags.add(stats)
        await parent.stats(stats)

    return tell


async def tell_progress(core: Core, parent: Parent) -> None:
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        await parent.mention(
            RunProgress(
                step=core.next_step, in_flight=core.num_in_flight, ready=core.num_ready,
                batch_size=core.rollouts_a_batch, version=core.applied_version,
                live_bytes=core.live_bytes, held_back=core.is_held_back,
            )
        )  # fmt: skip


async def draw(run: RunDir, lookout: RolloutTracker) -> None:
    """The picture that `rollway why` reads."""
    await thread(write_whole, run.now, msgspec.json.encode(lookout.situation()))


async def look_out(run: RunDir, lookout: RolloutTracker, events: Events, parent: Parent) -> None:
    """Keep the picture up to date, and speak up when a step takes long."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        await draw(run, lookout)
        await events.put(Tick(time.monotonic()))
        if remark := lookout.remark():
            await parent.say(Notice(remark))


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, OrchestratorSpec, as_it_is, orchestrator)
