"""The orchestrator's process: wires sources, core and performer, and drives them."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from ...config.parts import EnvAddress, OrchestratorPart
from ...config.plan import env_name
from ...config.sections import FiltersConfig
from ...envserver import client as envs
from ...errors import ProtocolError
from ...inference import engine as engines
from ...inference.engine import Engine
from ...ledger.ledger import open_ledger
from ...loop.lanes import thread
from ...loop.part import Parent, as_it_is, run_part
from ...observe.lags import Lags
from ...observe.report import Notice, Progress
from ...payload.writer import SegmentWriter
from ...records.ids import PolicyVersion
from ...records.lag import ProcessStats
from ...records.rollout import Detection
from ...rundir.rundir import RunDir, write_whole
from ...transport.choose import open_shipping
from ...wire.keys import client_keys
from ...wire.messages import NewPolicy
from ..core.commands import Command, Dispatch
from ..core.core import Core, Limits
from ..core.events import Event, Started, Tick
from .advantage import credit_lane, is_built_in
from .lookout import Lookout
from .perform import Performer, together
from .phases import Phases
from .sources import Events, from_env, from_parent, from_trainer
from .steplog import StepLog

MAX_EVENTS = 10_000
PROGRESS_EVERY_S = 0.25
LOOK_EVERY_S = 1.0


async def drive(
    core: Core, events: Events, phases: Phases,
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


async def orchestrator(part: OrchestratorPart, parent: Parent) -> None:
    """One run's rollouts, from the first task to the last batch."""
    run, lags, phases = RunDir(part.run_dir), Lags(), Phases()
    events: Events = asyncio.Queue(MAX_EVENTS)
    ratios = {env.id: env.ratio for env in part.envs}
    core = Core(limits(part), ratios, part.first_step, part.restored.cursors)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ledger = await enter(open_ledger(run.ledger))
        engine = await enter(connect_engine(part))
        if part.push_weights and await engine.weight_version() not in part.has_weights_if:
            await engine.update_weights(part.push_weights, part.first_step - 1)
        clients = {
            env.id: await enter(connected(part, env, stack.enter_context(landing(run, part, env.id))))
            for env in part.envs
        }
        max_groups = part.max_outstanding
        credit = await enter(credit_lane(part.orchestrator, parent.watch, max_groups))
        lookout = Lookout(core, part.orchestrator.batch_size)
        shipping = stack.enter_context(
            open_shipping(run, part.transport, part.first_step, part.max_steps)
        )
        performer = Performer(
            run, clients, engine, shipping, ledger, events, part.sampling, part.orchestrator, credit,
            phases, lookout,
        )  # fmt: skip
        steps = StepLog(run, parent, lags, lambda: gauges(core), phases)
        parent.in_flight, parent.on_stats = lambda: core.num_in_flight, tell_stats(parent, lags)
        await parent.ready(shipping.address)
        async with asyncio.TaskGroup() as tasks:
            sources = [
                *(from_env(id, one, events, performer, lags, parent) for id, one in clients.items()),
                shipping.serve(),
                from_trainer(shipping, part.first_step, part.max_steps, events, performer, steps),
                tell_progress(core, part.orchestrator.batch_size, parent),
                look_out(run, lookout, events, parent),
            ]
            running = [tasks.create_task(source) for source in sources]
            driving = tasks.create_task(drive(core, events, phases, performer.perform))
            listening = tasks.create_task(from_parent(parent, lags))
            await performer.resume(part.restored)
            await events.put(Started(part.restored))
            await asyncio.wait([driving, listening], return_when=asyncio.FIRST_COMPLETED)
            for task in (*running, driving, listening):
                task.cancel()
        if core.finished:
            await thread(run.drop_payload)


def connect_engine(part: OrchestratorPart) -> AbstractAsyncContextManager[Engine]:
    """For weights only: routes are the workers' business."""
    return engines.connect(
        part.engine_url,
        routes=False,
        deadline_s=part.request_deadline_s,
        model=part.engine_model,
        key=os.environ.get(part.engine_key_var, ""),
    )


@asynccontextmanager
async def connected(
    part: OrchestratorPart, env: EnvAddress, landing: SegmentWriter
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


def landing(run: RunDir, part: OrchestratorPart, env: str) -> SegmentWriter:
    """Where payload of workers that share no file system with this run is written."""
    wants = part.payload
    name = f"r{part.generation}.{env_name(env)}.in.0" if part.generation else f"{env_name(env)}.in.0"
    return SegmentWriter(run.payload, name, wants.segment_mb << 20, wants.durability)


def limits(part: OrchestratorPart) -> Limits:
    wants = part.orchestrator
    return Limits(
        batch_size=wants.batch_size,
        group_size=wants.group_size,
        max_in_flight=wants.max_in_flight,
        max_outstanding=part.max_outstanding,
        max_off_policy_steps=wants.max_off_policy_steps,
        max_fruitless_groups=wants.max_fruitless_groups,
        max_steps=part.max_steps,
        micro_batch_tokens=part.micro_batch_tokens,
        ranks=part.ranks,
        payload_bytes=part.payload.budget_mb << 20,
        patience_s=wants.env_patience_s,
        drop_zero_advantage=part.filters.zero_advantage == "enforce",
        enforced=enforced(part.filters),
        asks_for_credit=not is_built_in(wants.advantage),
        baseline=wants.advantage,
        length_penalty=wants.length_penalty,
        length_by_turns=wants.length_penalty_by == "turns",
        correct_at=wants.correct_at,
    )


def enforced(filters: FiltersConfig) -> frozenset[Detection]:
    modes: dict[Detection, str] = {"gibberish": filters.gibberish, "repetition": filters.repetition}
    return frozenset(sign for sign, mode in modes.items() if mode == "enforce")


def gauges(core: Core) -> dict[str, float]:
    return {
        "in_flight": core.num_in_flight,
        "ready": core.num_ready,
        "payload/live_bytes": core.live_bytes,
        "payload/held_back": float(core.is_held_back),
    }


def tell_stats(parent: Parent, lags: Lags) -> Callable[[ProcessStats], Awaitable[None]]:
    async def tell(stats: ProcessStats) -> None:
        lags.add(stats)
        await parent.stats(stats)

    return tell


async def tell_progress(core: Core, batch_size: int, parent: Parent) -> None:
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        await parent.mention(
            Progress(
                step=core.next_step, in_flight=core.num_in_flight, ready=core.num_ready,
                batch_size=batch_size, version=core.applied_version, live_bytes=core.live_bytes,
                held_back=core.is_held_back,
            )
        )  # fmt: skip


async def look_out(run: RunDir, lookout: Lookout, events: Events, parent: Parent) -> None:
    """Keep the picture that `rollway why` reads, and speak up when a step takes long."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        picture = msgspec.json.encode(lookout.situation())
        await thread(write_whole, run.now, picture)
        await events.put(Tick(time.monotonic()))
        if remark := lookout.remark():
            await parent.say(Notice(remark))


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, OrchestratorPart, as_it_is, orchestrator)
