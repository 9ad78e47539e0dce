"""A worker of the kind in use: replies read whole, all work on them sent to 512 threads.

It does what rollway's worker does: renders, asks, takes the reply in, merges linearly, keeps a
transcript, and hands the finished rollout on. Token columns are lists of Python numbers and the record
travels as msgpack, routes in base64, as in the systems it stands for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import httpx
import msgspec
import numpy as np
import pybase64
import pydantic
import zmq
import zmq.asyncio

from loopback.report import QUIET
from rollway.config.sections import ModelConfig
from rollway.inference.rendering.rendering import SyncRenderer
from rollway.loop.watch.run import LoopWatch, run
from rollway.records.task import Message

POOL = 512
Post = Callable[[bytes], Awaitable[bytes]]


class WorkerSpec(msgspec.Struct):
    """Whom to ask, with which client, and what to say for how many turns."""

    url: str
    client: str
    model: str
    text: str
    turns: int
    rollouts: int
    sink: str
    inline: bool = False
    once: bool = False


class Logprobs(pydantic.BaseModel):
    token_logprobs: list[float]


class Choice(pydantic.BaseModel):
    token_ids: list[int]
    logprobs: Logprobs
    routed_experts: str


class Reply(pydantic.BaseModel):
    choices: list[Choice]


class Record:
    """One rollout as it grows: Python lists, and routes in pieces or, inline, as one array."""

    def __init__(self, quadratic: bool) -> None:
        self._quadratic = quadratic
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.routes: list[Any] = []

    def take(self, body: bytes, prompt: list[int]) -> list[int]:
        """Parse a reply, decode its routes, keep what is new."""
        choice = Reply.model_validate(msgspec.json.decode(body)).choices[0]
        raw = pybase64.b64decode(choice.routed_experts, validate=True)
        routes = _npy(raw)
        known = max(0, len(self.ids) - 1)
        new = routes[known:] if len(routes) >= len(prompt) else routes
        added = prompt[len(self.ids) :]
        if self._quadratic:  # everything again at every turn
            self.ids = prompt + choice.token_ids
            whole = [np.concatenate([*self.routes, new])]
        else:
            self.ids += added
            self.ids += choice.token_ids
            whole = [*self.routes, new.copy()]
        self.mask += [0] * len(added) + [1] * len(choice.token_ids)
        self.logprobs += [0.0] * len(added) + choice.logprobs.token_logprobs
        self.routes = whole
        return choice.token_ids

    def pack(self, messages: list[Message]) -> bytes:
        routes = np.concatenate(self.routes)
        return msgspec.msgpack.encode(
            {
                "ids": self.ids,
                "mask": self.mask,
                "logprobs": self.logprobs,
                "routes": pybase64.b64encode_as_string(routes),
                "shape": routes.shape,
                "messages": msgspec.to_builtins(messages),
            }
        )


def _npy(raw: bytes) -> Any:
    size = int.from_bytes(raw[8:10], "little")
    shape = eval(raw[10 : 10 + size].decode())["shape"]
    return np.frombuffer(raw, np.uint8, offset=10 + size).reshape(shape)


class Worker:
    """Runs rollouts; `self._do` is `asyncio.to_thread`, or a plain call for *inline*."""

    def __init__(
        self, spec: WorkerSpec, rendering: SyncRenderer, post: Post, sink: Any
    ) -> None:
        self._spec = spec
        self._rendering = rendering
        self._post = post
        self._sink = sink
        self.num_turns = 0

    async def _do(self, call: Callable[..., Any], *args: Any) -> Any:
        return call(*args) if self._spec.inline else await asyncio.to_thread(call, *args)

    async def rollout(self, turns: int) -> None:
        record = Record(quadratic=self._spec.inline)
        messages: list[Message] = []
        prompt: list[int] | None = []
        drawn: list[int] = []
        for turn in range(turns):
            new = Message("user", self._spec.text)
            messages.append(new)
            if turn:
                prompt = await self._do(self._rendering.extend, prompt, drawn, [new])
            else:
                prompt = await self._do(self._rendering.prompt, messages)
            assert prompt is not None
            start = max(0, len(record.ids) - 1)
            asked = {"prompt": prompt, "routed_experts_prompt_start": start}
            body = await self._post(await self._do(msgspec.json.encode, asked))
            drawn = await self._do(record.take, body, prompt)
            self.num_turns += 1
            parsed = await self._do(self._rendering.parse, drawn)
            messages.append(Message("assistant", parsed.content, parsed.reasoning))
        await self._sink.send(await self._do(record.pack, messages), copy=False)

    async def forever(self, first: int) -> None:
        """Rollouts one after the other; the first is shorter, so that ends are spread evenly."""
        await self.rollout(first)
        while not self._spec.once:
            await self.rollout(self._spec.turns)


def threads_worker(pipe: Connection, spec: WorkerSpec) -> None:
    """Runs until killed; every message is answered by the lag since the last one, and all turns."""

    async def serve(watch: LoopWatch, post: Post) -> None:
        rendering = SyncRenderer(
            ModelConfig(
                path=spec.model, renderer="qwen3", template={"enable_thinking": False}
            )
        )
        context = zmq.asyncio.Context()
        sink = context.socket(zmq.PUSH)
        sink.connect(spec.sink)
        worker = Worker(spec, rendering, post, sink)
        turns = [
            spec.turns if spec.once else 1 + n % spec.turns for n in range(spec.rollouts)
        ]
        tasks = [asyncio.create_task(worker.forever(first)) for first in turns]
        while True:
            await asyncio.sleep(0.02)
            for task in tasks:
                if task.done():
                    task.result()
            if pipe.poll():
                pipe.recv()
                pipe.send((watch.take().lag, worker.num_turns))

    async def main(watch: LoopWatch) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(POOL))
        url = f"{spec.url}/v1/completions"
        if spec.client == "httpx":
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with httpx.AsyncClient(limits=limits, timeout=None) as client:

                async def post(body: bytes) -> bytes:
                    return (await client.post(url, content=body)).content

                await serve(watch, post)
        else:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def post(body: bytes) -> bytes:
                    async with session.post(url, data=body) as response:
                        return await response.read()

                await serve(watch, post)

    run("threads", QUIET, main)
