"""Whom a worker's rollouts talk with: an engine of tokens, or an endpoint that knows messages only."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from msgspec import Struct

from ..config.parts import RouterPart
from ..envs.chat import Speaker
from ..inference import engine as engines
from ..inference.chatcompletions import ChatClient
from ..inference.engine import Engine
from ..inference.longreply import LongReplies
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

    def talk(self, sampling: Sampling, track: Track) -> Talk: ...


class TokenPolicy:
    """An engine that takes and gives token ids: every turn is traced."""

    def __init__(self, engine: Engine, renderer: Renderer) -> None:
        self._engine = engine
        self._renderer = renderer

    @property
    def version(self) -> int:
        return self._engine.version

    @version.setter
    def version(self, version: int) -> None:
        self._engine.version = version

    def talk(self, sampling: Sampling, track: Track) -> Conversation:
        return Conversation(self._engine, self._renderer, sampling, Record(track))


class MessagePolicy:
    """A chat endpoint: good for rewards, useless for training."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self.version = 0

    def talk(self, sampling: Sampling, track: Track) -> Dialogue:
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
    name: str, server: RouterPart, speech: Speech | None, watch: Watch
) -> AsyncIterator[Policy]:
    """The policy, once it answers."""
    wants, key = server.engine, os.environ.get(server.engine.key_var, "")
    if speech is None:
        deadline_s = wants.request_deadline_s
        with ChatClient(server.engine_url, wants.model, key, deadline_s=deadline_s) as client:
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
        engine = await stack.enter_async_context(
            engines.connect(
                server.engine_url,
                routes=wants.routes,
                deadline_s=wants.request_deadline_s,
                shape=speech.shape,
                long_replies=stack.enter_context(LongReplies(reply_lane)),
                model=wants.model,
                key=key,
            )
        )
        yield TokenPolicy(engine, Renderer(speech.rendering, server.model, render_lane))
