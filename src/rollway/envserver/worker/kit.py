"""What all rollouts of one worker share: the environment, speakers, lanes for its code, toolsets."""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from ...config.sections import ServerConfig
from ...config.specs import WorkerSpec
from ...envs.chat import Speaker
from ...envs.environment import Environment
from ...envs.in_lane import EnvSpec, load_shared
from ...inference.chat.client import ChatClient
from ...inference.engines.engine import PolicyState
from ...inference.engines.link import EngineAccess
from ...inference.engines.pool import PoolConfig, open_pool
from ...inference.rendering.rendering import Renderer, SyncRenderer
from ...inference.replies.long_replies import LongReplies
from ...inference.replies.routes import RouteShape, read_route_shape
from ...loop.lanes.lanes import Lane, ProcessLane
from ...loop.lanes.memory import load_and_limit
from ...loop.watch.run import LoopWatch
from ...payload.store import FrameStore, PayloadStore
from ...payload.writer import SegmentWriter
from ...records.payload import SegmentName
from .live_rollout import LiveRollout
from .message_speaker import MessageSpeakers
from .plain_code import PlainCode
from .rewards import Scoring
from .token_speaker import TokenSpeakers
from .toolsets import OpenToolsets


class SpeakerFactory(Protocol):
    """Gives each rollout a speaker to talk with the policy through."""

    def speaker_for(self, live: LiveRollout) -> Speaker: ...


class Kit(Struct, frozen=True):
    """What the rollouts of one worker share."""

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
    return Kit(config, env, speakers, plain, scoring, OpenToolsets())


class Prepared(Struct, frozen=True):
    """What takes a worker long to load, loaded before its event loop starts. An endpoint that answers
    with messages needs neither a renderer nor the shape of routes."""

    part: WorkerSpec
    spec: EnvSpec
    env: Environment
    renderer: SyncRenderer | None
    shape: RouteShape | None
    policy: PolicyState


def prepare(part: WorkerSpec) -> Prepared:
    server, env = part.server, part.server.env
    spec = EnvSpec(env.id, msgspec.json.encode(env.args), server.seed)
    renderer = shape = None
    if server.speaks == "tokens":
        renderer, shape = SyncRenderer(server.model), read_route_shape(server.model.path)
    return Prepared(part, spec, spec.build(), renderer, shape, PolicyState())


@asynccontextmanager
async def open_kit(prepared: Prepared, watch: LoopWatch) -> AsyncIterator[Kit]:
    """Open a worker's engines, lanes and toolsets."""
    name, spec = prepared.part.name, prepared.spec
    config, limits = prepared.part.server.env.local, prepared.part.server.limits
    async with AsyncExitStack() as stack:
        speakers = await stack.enter_async_context(open_speakers(prepared, watch))
        scoring_lane = await stack.enter_async_context(
            ProcessLane(
                f"{name}.score", config.scoring_processes, label="reward", watch=watch,
                warm=(load_and_limit, limits.scoring_memory_mb, load_shared, spec),
                max_waiting=config.concurrency,
            )
        )  # fmt: skip
        waiting = 4 * config.concurrency
        plain_lane = await stack.enter_async_context(
            ProcessLane(f"{name}.plain", limits.plain_processes, label="plain code", max_waiting=waiting)
        )
        kit = build_kit(config, spec, prepared.env, speakers, scoring_lane, plain_lane)
        await stack.enter_async_context(kit.toolsets)
        yield kit


@asynccontextmanager
async def open_speakers(prepared: Prepared, watch: LoopWatch) -> AsyncIterator[SpeakerFactory]:
    """Connect to the engines. A patient worker waits until one answers; others raise EngineError."""
    part, server, policy = prepared.part, prepared.part.server, prepared.policy
    engine, key = server.engine, os.environ.get(server.engine.key_var or "", "")
    if prepared.renderer is None:
        deadline_s = engine.request_deadline_s
        url, model = server.engine_urls[0], engine.model or ""
        with ChatClient(url, model, key, deadline_s=deadline_s) as client:
            await client.check()
            yield MessageSpeakers(client, policy)
        return
    async with AsyncExitStack() as stack:
        render_lane = await stack.enter_async_context(
            ProcessLane(
                f"{part.name}.render", size=1, label="rendering", watch=watch,
                max_waiting=4 * server.env.local.concurrency,
            )
        )  # fmt: skip
        reply_lane = await stack.enter_async_context(
            ProcessLane(f"{part.name}.replies", size=1, label="reply", watch=watch)
        )
        long_replies = stack.enter_context(LongReplies(reply_lane))
        config = PoolConfig(
            engines=tuple(
                EngineAccess(url, engine.request_deadline_s, engine.model or "", key)
                for url in server.engine_urls
            ),
            routes=engine.routes,
            shape=prepared.shape,
            patience_s=engine.patience_s,
        )
        engines = await stack.enter_async_context(
            open_pool(config, policy, long_replies, is_patient=part.is_patient)
        )
        yield TokenSpeakers(engines, Renderer(prepared.renderer, server.model, render_lane))


def open_store(part: WorkerSpec) -> AbstractContextManager[PayloadStore]:
    """Open the place where a worker's payload goes."""
    server, payload = part.server, part.server.payload
    if payload.store == "frames":
        return nullcontext(FrameStore(server.limits.frames_mb << 20))
    first = SegmentName(part.place_name, part.life, generation=server.generation)
    max_bytes = server.limits.segment_mb << 20
    return SegmentWriter(Path(server.payload_dir), first, max_bytes, payload.durability)
