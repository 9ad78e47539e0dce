"""Binary replies of a real vLLM against base64 inside JSON, taking turns on one server.

    python bench/binary_replies.py [--full] [--rounds 6] [--requests 96] [--prompt 600] [--json FILE]

Prints the bytes of a reply, the CPU time of the client that reads it (the code of an env worker), and
the CPU time of vLLM's API server. Needs the vLLM that `make test-vllm` installs.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from loopback.report import arguments, finish, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests_vllm.models import write_model
from tests_vllm.servers import PROGRAM, RIGHT, ROUTES, Server, serving

from rollway.inference.engines import engine as engine_module
from rollway.inference.engines.dialect import make_prompt
from rollway.inference.engines.engine import Engine, open_engine
from rollway.inference.engines.link import EngineAccess
from rollway.inference.engines.vllm import Vllm
from rollway.inference.replies.checks import ReplyRules
from rollway.records.turn import Sampling

LAYERS, TOPK = 24, 8
"""192 bytes of routes a token, in a model that is tiny otherwise."""
CONCURRENCY = 16
KINDS = {"binary": engine_module.ACCEPT, "base64": "application/json"}


async def draw_all(engine: Engine, requests: int, num_prompt: int) -> None:
    """Draw replies, some at the same time. Each asks for the routes of its whole prompt."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def draw(number: int) -> None:
        prompt = make_prompt(np.arange(number, number + num_prompt, dtype=np.int32) % 250)
        async with places:
            await engine.complete(prompt, Sampling(2), [], 0)

    async with asyncio.TaskGroup() as tasks:
        for number in range(requests):
            tasks.create_task(draw(number))


async def measure(
    server: Server, work: Callable[[], Awaitable[None]], requests: int
) -> tuple[float, float]:
    """Return the milliseconds of CPU a request, of this process and of vLLM's API server."""
    api = psutil.Process(server.process.pid)
    before, own_s = api.cpu_times(), time.process_time()
    await work()
    after, own_s = api.cpu_times(), time.process_time() - own_s
    api_s = after.user + after.system - before.user - before.system
    return 1e3 * own_s / requests, 1e3 * api_s / requests


def reply_bytes(server: Server, accept: str, num_prompt: int) -> int:
    prompt = make_prompt(np.arange(num_prompt, dtype=np.int32) % 250)
    body = Vllm().encode_request("policy", prompt, Sampling(2), [], 0)
    return len(server.fetch("/v1/completions", json.loads(body), Accept=accept))


async def compare(server: Server, args: Any) -> dict[str, dict[str, float]]:
    rounds, requests = args.rounds * (3 if args.full else 1), args.requests
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    access, rules = EngineAccess(server.url, 60), ReplyRules(wants_routes=True)
    async with open_engine(access, rules) as engine:
        await draw_all(engine, requests, args.prompt)
        for number in range(rounds):
            for kind in list(KINDS)[:: 1 if number % 2 else -1]:
                engine_module.ACCEPT = KINDS[kind]
                found[kind].append(
                    await measure(
                        server, lambda: draw_all(engine, requests, args.prompt), requests
                    )
                )
    rows = {}
    for kind, accept in KINDS.items():
        worker, api = (statistics.median(values) for values in zip(*found[kind], strict=True))
        rows[kind] = {
            "bytes": reply_bytes(server, accept, args.prompt),
            "worker CPU ms": worker,
            "vLLM API server CPU ms": api,
            "sum ms": worker + api,
        }
    binary, base64 = rows["binary"], rows["base64"]
    rows["binary / base64"] = {key: binary[key] / base64[key] for key in binary}
    return rows


def main() -> None:
    args = arguments(
        __doc__,
        rounds=(6, "measurements of each kind"),
        requests=(96, "requests of a measurement"),
        prompt=(600, "tokens of a prompt"),
    )
    if not PROGRAM.exists():
        print(f"left out: no vLLM at {PROGRAM} (make test-vllm installs it)")
        return
    with TemporaryDirectory(prefix="rollway-bench-") as name:
        changes = {"num_hidden_layers": LAYERS, "num_experts": 16, "num_experts_per_tok": TOPK,
                   "hidden_size": 64, "moe_intermediate_size": 16}  # fmt: skip
        model = write_model(Path(name) / "model", **changes)
        with serving(model, Path(name) / "vllm.log", *RIGHT, *ROUTES) as server:
            figures = asyncio.run(compare(server, args))
    table(figures, list(figures["binary"]))
    finish("binary_replies", figures, args.json)


if __name__ == "__main__":
    main()
