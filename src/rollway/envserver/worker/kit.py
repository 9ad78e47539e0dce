"""What all rollouts of one worker share: the environment, speakers, lanes for its code, toolsets."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from ...config.sections import ServerConfig
from ...config.specs import RouterSpec, WorkerSpec
from ...envs.chat import Speaker
from ...envs.environment import Environment
from ...envs.in_lane import EnvSpec, load_shared
from ...inference.engines.engine import ExpectedPolicy, Policies
from ...inference.engines.link import EngineAccess
from ...inference.engines.pool import PoolConfig, open_pool
from ...inference.rendering.rendering import Renderer, SyncRenderer
from ...inference.replies.checks import ReplyRules
from ...inference.replies.long_replies import LongReplies
from ...loop.lanes.lanes import Lane, ProcessLane
from ...loop.lanes.memory import load_and_limit
from ...loop.watch.run import LoopWatch
from ...model.shape import read_shape
from ...payload.spool import remove_spools
from ...payload.store import FrameStore, PayloadStore
from ...payload.writer import SegmentWriter
from ...records.payload import SegmentName
from ...records.task import Message
from .live_rollout import LiveRollout
from .plain_code import PlainCode
from .rewards import Scoring
from .token_speaker import TokenSpeakers
from .toolsets import OpenToolsets

GREETING = [Message("user", "Hello")]
"""Shows whether a chat endpoint has the tokenizer and the chat template of the trained model."""


class SpeakerFactory(Protocol):
    """Gives each rollout a speaker to talk with the policy through."""

    def speaker_for(self, live: LiveRollout) -> Speaker: ...


class Kit(Struct, frozen=True):
    config: ServerConfig
    env: Environment
    speakers: SpeakerFactory
    plain: PlainCode
    scoring: Scoring
    toolsets: OpenToolsets
    """The owner of the kit closes them."""


def build_kit(
    config: ServerConfig, spec: EnvSpec, env: Environment, speakers: SpeakerFactory,
    scoring_lane: Lane, plain_lane: Lane,
) -> Kit:  # fmt: skip
    """Build a kit whose rewards and plain code run in these lanes."""
    plain = PlainCode(spec, plain_lane, config.rollout_deadline_s)
    scoring = Scoring(config, spec, env, scoring_lane)
    return Kit(config, env, speakers, plain, scoring, OpenToolsets(config.tool_deadline_s))


class Prepared(Struct, frozen=True):
    """What takes a worker long to load, loaded before its event loop starts. An endpoint that answers
    with messages needs no renderer."""

    part: WorkerSpec
    spec: EnvSpec
    env: Environment
    connect: "Connect"
    renderer: SyncRenderer | None
    rules: ReplyRules
    policies: Policies
    greeting: list[int] = []
    """The token ids of GREETING, as the trained model has them. Empty unless messages are trained."""


Connect = Callable[[Prepared, LoopWatch], AbstractAsyncContextManager[SpeakerFactory]]


def prepare(part: WorkerSpec) -> Prepared:
    server, env = part.server, part.server.env
    spec = EnvSpec(env.id, msgspec.json.encode(env.args), server.seed, part.source)
    if server.speaks == "tokens":
        renderer, rules = SyncRenderer(server.model), _rules(server)
        return Prepared(part, spec, spec.build(), open_engines, renderer, rules, Policies())
    # only here, because the client of chat endpoints takes long to import
    from .message_speaker import open_chat

    if not server.is_training:
        rules = ReplyRules(wants_routes=False)
        return Prepared(part, spec, spec.build(), open_chat, None, rules, Policies())
    rules = ReplyRules(wants_routes=False, shape=read_shape(server.model.path))
    greeting = SyncRenderer(server.model).prompt(GREETING)
    return Prepared(part, spec, spec.build(), open_chat, None, rules, Policies(), greeting)


def _rules(server: RouterSpec) -> ReplyRules:
    """Ask for routes if the model has experts, unless the run file says otherwise."""
    shape, wanted = read_shape(server.model.path), server.engine.routes
    has_experts = shape is not None and shape.has_experts
    wants_routes = has_experts if wanted is None else wanted
    return ReplyRules(wants_routes, shape, knows_versions=server.is_training)


MAX_SCORING = 8
"""Scoring processes of one worker, unless the run file says how many: each holds the environment."""


def num_scoring_processes(config: ServerConfig) -> int:
    """Share the cores that this process may use among the workers of its server."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    shared = max(1, min(MAX_SCORING, (cores or 1) // config.workers))
    return config.scoring_processes or shared


@asynccontextmanager
async def open_kit(prepared: Prepared, watch: LoopWatch) -> AsyncIterator[Kit]:
    name, spec = prepared.part.place_name, prepared.spec
    config, limits = prepared.part.server.env.local, prepared.part.server.limits
    most, num_plain = config.concurrency, limits.plain_processes
    scoring = ProcessLane(
        f"{name}.score", num_scoring_processes(config), label="reward", watch=watch,
        warm=(load_and_limit, limits.scoring_memory_mb, load_shared, spec), max_waiting=most,
    )  # fmt: skip
    plain = ProcessLane(f"{name}.plain", num_plain, label="plain code", max_waiting=4 * most)
    async with prepared.connect(prepared, watch) as speakers, scoring, plain:
        kit = build_kit(config, spec, prepared.env, speakers, scoring, plain)
        async with kit.toolsets:
            yield kit


@asynccontextmanager
async def open_engines(
    prepared: "Prepared", watch: LoopWatch
) -> AsyncIterator[SpeakerFactory]:
    """Connect to the engines. A patient worker waits until one answers; others raise EngineError."""
    assert prepared.renderer is not None, "prepared for engines that take tokens"
    name, server = prepared.part.name, prepared.part.server
    engine, key = server.engine, os.environ.get(server.engine.key_var or "", "")
    deadline_s, model = engine.request_deadline_s, engine.model or ""
    waiting = 4 * server.env.local.concurrency
    rendering = ProcessLane(
        f"{name}.render", 1, label="rendering", watch=watch, max_waiting=waiting
    )
    reading = ProcessLane(f"{name}.replies", 1, label="reply", watch=watch)
    config = PoolConfig(
        engines=tuple(
            EngineAccess(url, deadline_s, model, key) for url in server.engine_urls
        ),
        rules=prepared.rules,
        patience_s=engine.patience_s,
        max_context=None if engine.is_embedded else engine.max_context,
    )
    async with rendering, reading:
        with LongReplies(reading) as replies:
            is_patient = prepared.part.is_patient
            policy = ExpectedPolicy()
            async with open_pool(config, policy, replies, is_patient=is_patient) as engines:
                most = engines.max_context
                renderer = Renderer(prepared.renderer, server.model, rendering, most)
                yield TokenSpeakers(engines, renderer, prepared.policies)


SPOOL_ABOVE_BYTES = 64 << 20
"""Routes that all rollouts of a worker may keep in memory. A file of its own costs a rollout some work,
so its routes stay in memory up to its share, within these limits."""
MIN_LOOSE_BYTES, MAX_LOOSE_BYTES = 128 << 10, 1 << 20


def open_store(part: WorkerSpec) -> AbstractContextManager[PayloadStore]:
    server, payload = part.server, part.server.payload
    if payload.store == "frames":
        return nullcontext(FrameStore(server.limits.frames_mb << 20))
    folder, max_bytes = Path(server.payload_dir), server.limits.segment_mb << 20
    first = SegmentName(part.place_name, part.life, generation=server.generation)
    remove_spools(folder, first.owner.removesuffix(str(part.life)))
    share = SPOOL_ABOVE_BYTES // server.env.local.concurrency
    spool_bytes = min(MAX_LOOSE_BYTES, max(MIN_LOOSE_BYTES, share))
    return SegmentWriter(folder, first, max_bytes, payload.durability, spool_bytes)
