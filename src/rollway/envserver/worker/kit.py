"""What a worker needs before it can run rollouts: the environment, lanes for its code, a place for
payload."""

from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from pathlib import Path

import msgspec

from ...config.specs import RouterSpec, WorkerSpec
from ...envs.environment import Environment
from ...envs.in_lane import EnvSpec, load_shared
from ...loop.lanes.lanes import ProcessLane
from ...loop.lanes.memory import load_and_limit
from ...loop.watch.run import LoopWatch
from ...payload.store import FrameStore, PayloadStore
from ...payload.writer import SegmentWriter
from ...records.ids import WorkerName
from ...records.payload import SegmentName
from .plain_code import PlainCode
from .rewards import Scoring
from .rollout import RolloutRunner
from .speakers import SpeakerFactory, Speech, load_speech
from .toolsets import OpenToolsets


class Prepared(msgspec.Struct, frozen=True):
    """What takes long to load, loaded: the environment, and how the model's tokens are spoken."""

    part: WorkerSpec
    spec: EnvSpec
    env: Environment
    speech: Speech | None


def prepare(part: WorkerSpec) -> Prepared:
    config = part.server.env
    spec = EnvSpec(config.id, msgspec.json.encode(config.args), part.server.seed)
    return Prepared(part, spec, spec.build(), load_speech(part.server))


async def open_runner(
    prepared: Prepared,
    watch: LoopWatch,
    policy: SpeakerFactory,
    store: PayloadStore,
    stack: AsyncExitStack,
) -> RolloutRunner:
    """The lanes for user code, and what runs rollouts with them."""
    name, spec = prepared.part.name, prepared.spec
    config, limits = prepared.part.server.env.local, prepared.part.server.limits
    waiting = 4 * config.concurrency
    score_lane = await stack.enter_async_context(
        ProcessLane(
            f"{name}.score", config.scoring_processes, label="reward", watch=watch,
            warm=(load_and_limit, limits.scoring_memory_mb, "its bound", load_shared, spec),
            max_waiting=config.concurrency,
        )
    )  # fmt: skip
    plain_lane = await stack.enter_async_context(
        ProcessLane(f"{name}.plain", limits.plain_processes, label="plain code", max_waiting=waiting)
    )
    return RolloutRunner(
        config,
        prepared.env,
        policy,
        PlainCode(spec, plain_lane, config.rollout_deadline_s),
        Scoring(config, spec, prepared.env, score_lane),
        await stack.enter_async_context(OpenToolsets()),
        store,
    )


def open_store(server: RouterSpec, name: WorkerName) -> AbstractContextManager[PayloadStore]:
    """Where this worker's payload goes."""
    wants = server.payload
    if wants.store == "frames":
        return nullcontext(FrameStore(server.limits.frames_mb << 20))
    folder = Path(server.payload_dir)
    writer, _, incarnation = name.rpartition(".")
    first = SegmentName(writer, int(incarnation), generation=server.generation)
    return SegmentWriter(folder, first, server.limits.segment_mb << 20, wants.durability)
