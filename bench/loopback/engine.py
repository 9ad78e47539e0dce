"""A loopback engine: answers every request after a fixed latency with a body prepared beforehand.

It speaks just enough HTTP to be asked by any client, so that it costs little beside what is measured.
"""

import asyncio
from functools import cache
from multiprocessing.connection import Connection
from typing import cast

import msgspec
import numpy as np

from loopback.report import QUIET
from rollway.inference.replies.routes import encode_npy
from rollway.loop.watch.run import LoopWatch, run

LATENCY_S = 0.05


class EngineSpec(msgspec.Struct):
    """Bytes of a token's routes are layers × slots; `full` ignores where routes are asked from."""

    layers: int
    slots: int
    drawn: int
    full: bool = False
    latency_s: float = LATENCY_S
    context: int | None = None
    """How long a text may be; None if the engine does not say."""

    @property
    def models(self) -> bytes:
        return msgspec.json.encode({"data": [{"id": "bench", "max_model_len": self.context}]})


class Asked(msgspec.Struct):
    """What of a request decides how many positions are routed."""

    prompt: list[int]
    routed_experts_prompt_start: int | None = None


_asked = msgspec.json.Decoder(Asked)


@cache
def reply(positions: int, layers: int, slots: int, drawn: int) -> bytes:
    routes = np.arange(positions * layers * slots, dtype=np.uint8).reshape(
        positions, layers, slots
    )
    choice = {
        "finish_reason": "length",
        "token_ids": [7] * drawn,
        "logprobs": {"token_logprobs": [-0.5] * drawn},
        "routed_experts": encode_npy(routes),
    }
    return http(msgspec.json.encode({"choices": [choice]}))


def http(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Served:
    """Counts what was answered."""

    def __init__(self) -> None:
        self.num_turns = 0


class Connected(asyncio.Protocol):
    """One client's connection: a request at a time."""

    def __init__(self, spec: EngineSpec, served: Served) -> None:
        self._spec = spec
        self._served = served
        self._came = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1 << 30)

    def data_received(self, data: bytes) -> None:
        self._came += data
        end = self._came.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._came[:end]).lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._came) >= end + 4 + length:
            body = bytes(self._came[end + 4 : end + 4 + length])
            self._came.clear()
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            self._transport.write(http(self._spec.models))
            return
        if not head.startswith(b"post /v1/completions"):
            self._transport.write(http(b"{}"))  # new weights are as good as the old
            return
        asked, spec = _asked.decode(body), self._spec
        start = 0 if spec.full else asked.routed_experts_prompt_start or 0
        answer = reply(
            len(asked.prompt) + spec.drawn - 1 - start, spec.layers, spec.slots, spec.drawn
        )
        asyncio.get_running_loop().call_later(spec.latency_s, self._send, answer)

    def _send(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._served.num_turns += 1
            self._transport.write(answer)


def serve(pipe: Connection, spec: EngineSpec) -> None:
    """Serve on a free port, which goes down the pipe; every message is answered by the turns so far."""
    served = Served()

    async def main(watch: LoopWatch) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connected(spec, served), "127.0.0.1", 0, backlog=4096
        )
        pipe.send(server.sockets[0].getsockname()[1])
        while True:
            await asyncio.sleep(0.02)
            if pipe.poll():
                pipe.recv()
                pipe.send(served.num_turns)

    run("engine", QUIET, main)
