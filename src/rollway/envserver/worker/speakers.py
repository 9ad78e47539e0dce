"""Whom a worker's rollouts talk with: an engine of tokens, or an endpoint that knows messages only."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from msgspec import Struct

from ...config.specs import RouterSpec
from ...envs.chat import Speaker
from ...inference.chat.client import ChatClient
from ...inference.engines.link import EngineAccess
from ...inference.engines.pool import EnginePool, PoolConfig, open_pool
from ...inference.rendering.rendering import Renderer, SyncRenderer
from ...inference.replies.long_replies import LongReplies
from ...inference.replies.routes import RouteShape, read_route_shape
from ...loop.lanes.lanes import ProcessLane
from ...loop.watch.run import LoopWatch
from ...records.turn import Sampling
from .message_speaker import MessageSpeaker
from .record import Record
from .token_speaker import TokenSpeaker
from .track import Track


class Talk(Speaker, Protocol):
    """One dialogue with the policy, and the record it writes to."""

    @property
    def record(self) -> Record: ...
    def aside(self) -> "Talk":
        """Another dialogue, with a record of its own that nobody keeps."""


class SpeakerFactory(Protocol):
    """What rollouts are drawn from. `version` is the one it is known to be at."""

    version: int

    def talk(self, sampling: Sampling, track: Track, group: int) -> Talk:
        """A dialogue of a rollout of the group with this number."""


class TokenSpeakers:
    """Engines that take and give token ids: every turn is traced."""

    def __init__(self, engines: EnginePool, renderer: Renderer) -> None:
        self._engines = engines
        self._renderer = renderer

    @property
    def version(self) -> int:
        return self._engines.version

    @version.setter
    def version(self, version: int) -> None:
        self._engines.version = version

    def talk(self, sampling: Sampling, track: Track, group: int) -> TokenSpeaker:
        return TokenSpeaker(self._engines.pin(group), self._renderer, sampling, Record(track))


class MessageSpeakers:
    """A chat endpoint: good for rewards, useless for training."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self.version = 0

    def talk(self, sampling: Sampling, track: Track, group: int) -> MessageSpeaker:
        return MessageSpeaker(self._client, sampling, self.version, Record(track))


class Speech(Struct, frozen=True):
    """How messages become tokens and routes get their shape; takes long to load."""

    rendering: SyncRenderer
    shape: RouteShape | None


def load_speech(server: RouterSpec) -> Speech | None:
    """None for an endpoint of messages, which needs neither tokenizer nor model folder."""
    if server.speaks == "messages":
        return None
    return Speech(SyncRenderer(server.model), read_route_shape(server.model.path))


@asynccontextmanager
async def open_policy(
    name: str, server: RouterSpec, speech: Speech | None, watch: LoopWatch, *, is_patient: bool = False
) -> AsyncIterator[SpeakerFactory]:
    """The policy, if it answers; with `is_patient`, once it does."""
    wants, key = server.engine, os.environ.get(server.engine.key_var or "", "")
    if speech is None:
        deadline_s = wants.request_deadline_s
        with ChatClient(server.engine_urls[0], wants.model or "", key, deadline_s=deadline_s) as client:
            await client.check()
            yield MessageSpeakers(client)
        return
    async with AsyncExitStack() as stack:
        render_lane = await stack.enter_async_context(
            ProcessLane(
                f"{name}.render", size=1, label="rendering", watch=watch,
                max_waiting=4 * server.env.local.concurrency,
            )
        )  # fmt: skip
        reply_lane = await stack.enter_async_context(
            ProcessLane(f"{name}.replies", size=1, label="reply", watch=watch)
        )
        long_replies = stack.enter_context(LongReplies(reply_lane))
        config = pool_config(server, speech.shape, key)
        engines = await stack.enter_async_context(open_pool(config, long_replies, is_patient=is_patient))
        yield TokenSpeakers(engines, Renderer(speech.rendering, server.model, render_lane))


def pool_config(server: RouterSpec, shape: RouteShape | None, key: str) -> PoolConfig:
    wants = server.engine
    return PoolConfig(
        engines=tuple(
            EngineAccess(url, wants.request_deadline_s, wants.model or "", key)
            for url in server.engine_urls
        ),
        routes=wants.routes,
        shape=shape,
        patience_s=wants.patience_s,
    )
