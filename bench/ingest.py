"""Taking in replies with routes: reading bodies whole and parsing them, against rollway's client.

    python bench/ingest.py [--rollouts 256] [--turns 8] [--routes-kb 512] [--rounds 3] [--json FILE]

A loopback engine answers every request after 50 ms with JSON around base64 routes. *whole* awaits the
body, parses all of it with a typed parser and decodes the routes on the loop: the fast libraries, used
plainly. *rollway* is `inference.engine.Engine`. Both alternate in one run; a *control* process that does
nothing but tick shows the machine's own noise.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pybase64
from loopback.control import tick
from loopback.engine import serve

from rollway.config.sections import WatchConfig
from rollway.inference.engine import connect
from rollway.inference.prompt import prompt_of
from rollway.loop.run import Watch, run
from rollway.records.lag import LagStats
from rollway.records.turn import Sampling

DRAWN = 16
PROMPT = np.arange(512, dtype=np.int32)
spawn = multiprocessing.get_context("spawn")


def route_shape(routes_kb: int) -> tuple[int, int]:
    """Layers × slots that make a reply's routes this large."""
    return routes_kb * 1024 // (len(PROMPT) + DRAWN - 1) // 8, 8


class Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: dict[str, list[float]]
    routed_experts: str


class Reply(msgspec.Struct):
    choices: list[Choice]


async def whole(url: str, rollouts: int, turns: int) -> None:
    decoder = msgspec.json.Decoder(Reply)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def rollout() -> None:
            for _ in range(turns):
                body = msgspec.json.encode({"prompt": PROMPT.tolist()})
                async with session.post(f"{url}/v1/completions", data=body) as response:
                    choice = decoder.decode(await response.read()).choices[0]
                pybase64.b64decode(choice.routed_experts, validate=True)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(rollouts):
                tasks.create_task(rollout())


async def rollway(url: str, rollouts: int, turns: int) -> None:
    async with connect(url, routes=True, deadline_s=300) as engine:

        async def rollout() -> None:
            for _ in range(turns):
                await engine.complete(prompt_of(PROMPT), Sampling(DRAWN), [], routes_start=0)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(rollouts):
                tasks.create_task(rollout())


def measure(strategy: Any, url: str, args: Any) -> tuple[float, float, LagStats]:
    """Turns per second, CPU milliseconds a turn, lag."""

    async def main(watch: Watch) -> LagStats:
        await strategy(url, args.rollouts, args.turns)
        return watch.take().lag

    start_s, start_cpu_s = time.monotonic(), time.process_time()
    lag = run("bench", WatchConfig(stall_ms=100_000), main)
    num_turns = args.rollouts * args.turns
    wall_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    return num_turns / wall_s, cpu_s * 1000 / num_turns, lag


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--routes-kb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ours, theirs = spawn.Pipe()
    control_pipe, control_end = spawn.Pipe()
    spawn.Process(
        target=serve, args=(theirs, route_shape(args.routes_kb), DRAWN, True), daemon=True
    ).start()
    spawn.Process(target=tick, args=(control_end,), daemon=True).start()
    url = f"http://127.0.0.1:{ours.recv()}"
    figures: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for strategy in (whole, rollway):
            speed, cpu, lag = measure(strategy, url, args)
            control_pipe.send("take")
            bare = control_pipe.recv()
            for name, value in (
                ("turns_per_s", speed), ("cpu_ms_per_turn", cpu), ("lag_p99_ms", lag.p99 * 1000),
                ("lag_max_ms", lag.max * 1000), ("control_p99_ms", bare.p99 * 1000),
            ):  # fmt: skip
                figures.setdefault(f"{strategy.__name__}/{name}", []).append(value)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    print(f"{'':10} turns/s  CPU ms/turn  lag p99 ms  lag max ms  control p99 ms")
    for strategy in ("whole", "rollway"):
        row = [medians[f"{strategy}/{name}"] for name in (
            "turns_per_s", "cpu_ms_per_turn", "lag_p99_ms", "lag_max_ms", "control_p99_ms")]  # fmt: skip
        print(f"{strategy:10}{row[0]:8.0f}{row[1]:13.2f}{row[2]:12.1f}{row[3]:12.1f}{row[4]:16.1f}")
    for name in ("lag_p99_ms", "lag_max_ms"):
        ratios = [
            a / b for a, b in zip(figures[f"whole/{name}"], figures[f"rollway/{name}"], strict=True)
        ]
        print(f"ratio {name}: {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")
    line = json.dumps({"bench": "ingest", **medians})
    print(line)
    if args.json:
        args.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
