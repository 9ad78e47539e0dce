"""A real env server: router, workers and lanes in processes, with a client and an engine to watch."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from rollway.config.sections import (
    EngineConfig,
    EnvConfig,
    ModelConfig,
    PayloadConfig,
    ServerConfig,
)
from rollway.config.specs import RouterSpec, ServerLimits, WatchSpec
from rollway.envserver import client as envs
from rollway.payload.reader import SegmentReader
from rollway.payload.writer import SegmentWriter
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.lag import ProcessStats
from rollway.records.rollout import Outcome, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.testing import PolicyPrompt
from rollway.wire.messages import Run, ServerStats, WorkerLost

from .engine import EngineDouble, engine_double
from .parts import ROUTER, serving_part

ENVS = str(Path(__file__).parent / "envs.py")
UNRULY = str(Path(__file__).parent / "unruly.py")
FILES = PayloadConfig()
LIMITS = ServerLimits()


def plus_one(text: str) -> str:
    return str(int(text.rstrip("?")) + 1)


def env_config(id: str, kind: str, **server: Any) -> EnvConfig:
    """An environment of one of these files, with one worker unless `server` says otherwise."""
    return EnvConfig(
        id=id, args={"kind": kind}, server=ServerConfig(**{"workers": 1, **server})
    )


def router_spec(
    env: EnvConfig, model: Path | ModelConfig, url: str, folder: Path
) -> RouterSpec:
    if isinstance(model, Path):
        template = {"enable_thinking": False}
        model = ModelConfig(path=str(model), renderer="qwen3", template=template)
    return RouterSpec(
        env=env,
        model=model,
        engine=EngineConfig(),
        engine_urls=(url,),
        payload=FILES,
        payload_dir=str(folder),
        log_dir=str(folder),
        seed=0,
        watch=WatchSpec(),
    )


class Server:
    """A running server and what its client has received."""

    def __init__(
        self, client: envs.EnvClient, engine: EngineDouble, pid: int, folder: Path
    ) -> None:
        self.client = client
        self.engine = engine
        self.pid = pid
        self.reader = SegmentReader(folder)
        self.settled: dict[str, list[Settled]] = {}
        self.stats: list[ProcessStats] = []
        self.lost: list[WorkerLost] = []

    @property
    def address(self) -> str:
        address: bytes = self.client._wire.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return address.decode()

    async def run(self, rollout_id: str, number: str, max_tokens: int = 20) -> None:
        """Send a rollout of the task that asks for the number after this one."""
        task = Task(id=number, prompt=f"{number}?", answer=str(int(number) + 1))
        sampling = Sampling(max_tokens)
        await self.client.send(
            Run(RolloutId(rollout_id), 1, task, sampling, PolicyVersion(0), 0)
        )

    async def receive(self, kind: type[Any]) -> Any:
        """Receive everything up to the next message of a kind, and return that."""
        while True:
            message = await self.client.receive()
            match message:
                case Settled() as settled:
                    self.settled.setdefault(settled.rollout_id, []).append(settled)
                case ServerStats(stats=stats):
                    self.stats.append(stats)
                case WorkerLost():
                    self.lost.append(message)
            if isinstance(message, kind):
                return message

    def hold_replies(self, count: int = 1_000) -> asyncio.Event:
        """Let the engine answer the next `count` requests only after the returned event is set."""
        gate, answer, numbers = asyncio.Event(), self.engine.answer, itertools.count()

        async def answer_when_set(prompt: PolicyPrompt) -> str:
            if next(numbers) < count:
                await gate.wait()
            text = answer(prompt)
            assert isinstance(text, str)
            return text

        self.engine.answer = answer_when_set
        return gate

    async def outcome(self, rollout_id: str) -> Outcome:
        while rollout_id not in self.settled:
            await self.receive(Settled)
        return self.settled[rollout_id][0].outcome

    async def until_up(self, count: int) -> None:
        """Wait until this many workers have sent statistics."""
        while len({stats.process for stats in self.stats if ".w" in stats.process}) < count:
            await self.receive(ServerStats)

    def workers(self) -> list[psutil.Process]:
        """Return the worker processes, without the lanes below them."""
        return psutil.Process(self.pid).children()


@asynccontextmanager
async def serving(
    folder: Path, model: Path, kind: str, *, latency_s: float = 0.0, payload: PayloadConfig = FILES,
    landing: SegmentWriter | None = None, file: str = ENVS, limits: ServerLimits = LIMITS, **server: Any,
) -> AsyncIterator[Server]:  # fmt: skip
    """Serve an environment whose engine answers `n?` with n + 1. `server` are keys of `[env.server]`."""
    async with engine_double(model, plus_one, latency_s) as engine:
        env = env_config(file, kind, **{"concurrency": 8, **server})
        spec = router_spec(env, model, engine.url, folder)
        spec = msgspec.structs.replace(spec, payload=payload, limits=limits)
        async with (
            serving_part("test.router", ROUTER, spec, folder / "router.log") as (
                router,
                address,
            ),
            envs.connect(address, landing) as client,
        ):
            yield Server(client, engine, router.pid, folder)


@asynccontextmanager
async def unruly(
    folder: Path, model: Path, kind: str, **options: Any
) -> AsyncIterator[Server]:
    """Serve an environment that misbehaves. All its workers are up."""
    async with serving(folder, model, kind, file=UNRULY, **options) as server:
        await server.until_up(options.get("workers", 1))
        yield server
