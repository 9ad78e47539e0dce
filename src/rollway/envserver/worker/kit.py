"""What a worker needs before it can run rollouts: the environment, lanes for its code, a place for
payload."""

from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from pathlib import Path

import msgspec

from ...config.sections import FiltersConfig
from ...config.specs import RouterSpec, WorkerSpec
from ...envs.environment import Environment
from ...envs.in_lane import EnvSpec, load_shared
from ...loop.lanes.lanes import ProcessLane
from ...loop.lanes.memory import bounded
from ...loop.watch.run import LoopWatch
from ...payload.store import FrameStore, PayloadStore
from ...payload.writer import SegmentWriter
from ...records.ids import WorkerName
from ...trace.detect import Signs
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
    name, spec, config = prepared.part.name, prepared.spec, prepared.part.server.env
    waiting = 4 * config.concurrency
    score_lane = await stack.enter_async_context(
        ProcessLane(
            f"{name}.score", config.scoring_processes, what="reward", watch=watch,
            warm=(bounded, config.scoring_memory_mb, "env.scoring_memory_mb", load_shared, spec),
            max_waiting=config.concurrency,
        )
    )  # fmt: skip
    plain_lane = await stack.enter_async_context(
        ProcessLane(f"{name}.plain", config.plain_processes, what="plain code", max_waiting=waiting)
    )
    return RolloutRunner(
        config,
        prepared.env,
        policy,
        PlainCode(spec, plain_lane, config.rollout_deadline_s),
        Scoring(config, spec, prepared.env, score_lane),
        await stack.enter_async_context(OpenToolsets()),
        store,
        signs_of(prepared.part.server.filters),
    )


def signs_of(filters: FiltersConfig) -> Signs:
    return Signs(
        rare_from=filters.gibberish_rare_from,
        unlikely_below=filters.gibberish_logprob,
        run_length=filters.repetition_tokens,
        certain_above=filters.repetition_probability,
    )


def open_store(server: RouterSpec, name: WorkerName) -> AbstractContextManager[PayloadStore]:
    """Where this worker's payload goes."""
    wants = server.payload
    if wants.store == "frames":
        return nullcontext(FrameStore(wants.frames_mb << 20))
    folder = Path(server.payload_dir)
    mine = f"r{server.generation}.{name}" if server.generation else name
    return SegmentWriter(folder, mine, wants.segment_mb << 20, wants.durability)
