"""Whom a worker's rollouts talk with: an engine of tokens, or an endpoint that knows messages only."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from msgspec import Struct

from ..config.parts import RouterPart
from ..envs.chat import Speaker
from ..inference.chatcompletions import ChatClient
from ..inference.longreply import LongReplies
from ..inference.pool import EnginePool, PoolConfig, open_pool
from ..inference.rendering import Renderer, Rendering
from ..inference.routes import RouteShape, route_shape
from ..loop.lanes import ProcessLane
from ..loop.run import Watch
from ..records.turn import Sampling
from .conversation import Conversation
from .dialogue import Dialogue
from .record import Record
from .track import Track


class Talk(Speaker, Protocol):
    """One dialogue with the policy, and the record it writes to."""

    @property
    def record(self) -> Record: ...
    def aside(self) -> "Talk":
        """Another dialogue, with a record of its own that nobody keeps."""


class Policy(Protocol):
    """What rollouts are drawn from. `version` is the one it is known to be at."""

    version: int

    def talk(self, sampling: Sampling, track: Track, group: int) -> Talk:
        """A dialogue of a rollout of the group with this number."""


class TokenPolicy:
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

    def talk(self, sampling: Sampling, track: Track, group: int) -> Conversation:
        return Conversation(self._engines.seat(group), self._renderer, sampling, Record(track))


class MessagePolicy:
    """A chat endpoint: good for rewards, useless for training."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self.version = 0

    def talk(self, sampling: Sampling, track: Track, group: int) -> Dialogue:
        return Dialogue(self._client, sampling, self.version, Record(track))


class Speech(Struct, frozen=True):
    """How messages become tokens and routes get their shape; takes long to load."""

    rendering: Rendering
    shape: RouteShape | None


def load_speech(server: RouterPart) -> Speech | None:
    """None for an endpoint of messages, which needs neither tokenizer nor model folder."""
    if server.engine.speaks == "messages":
        return None
    return Speech(Rendering(server.model), route_shape(server.model.path))


@asynccontextmanager
async def open_policy(
    name: str, server: RouterPart, speech: Speech | None, watch: Watch, *, is_patient: bool = False
) -> AsyncIterator[Policy]:
    """The policy, if it answers; with `is_patient`, once it does."""
    wants, key = server.engine, os.environ.get(server.engine.key_var, "")
    if speech is None:
        deadline_s = wants.request_deadline_s
        with ChatClient(server.engine_urls[0], wants.model, key, deadline_s=deadline_s) as client:
            await client.check()
            yield MessagePolicy(client)
        return
    async with AsyncExitStack() as stack:
        render_lane = await stack.enter_async_context(
            ProcessLane(
                f"{name}.render", size=1, what="rendering", watch=watch,
                max_waiting=4 * server.env.concurrency,
            )
        )  # fmt: skip
        reply_lane = await stack.enter_async_context(
            ProcessLane(f"{name}.replies", size=1, what="reply", watch=watch)
        )
        long_replies = stack.enter_context(LongReplies(reply_lane))
        config = pool_config(server, speech.shape, key)
        engines = await stack.enter_async_context(open_pool(config, long_replies, is_patient=is_patient))
        yield TokenPolicy(engines, Renderer(speech.rendering, server.model, render_lane))


def pool_config(server: RouterPart, shape: RouteShape | None, key: str) -> PoolConfig:
    wants = server.engine
    return PoolConfig(
        urls=server.engine_urls,
        model=wants.model,
        key=key,
        routes=wants.routes,
        shape=shape,
        deadline_s=wants.request_deadline_s,
        patience_s=wants.patience_s,
    )
