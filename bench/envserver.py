"""An env server under load: rollway's, against a worker that does the same work in 512 threads.

    python bench/envserver.py [--rollouts 256] [--turns 20] [--workers 1] [--full-routes] [--json FILE]

A loopback engine answers every request after 50 ms with about 0.5 MB of routes. *threads* reads a body
whole and parses, decodes, merges and packs it with `asyncio.to_thread`, using the same fast libraries.
*rollway* is the real env server: router, workers, payload. A *control* process only ticks. Lag counts
from the first second on.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pybase64
from loopback import talk
from loopback.control import tick
from loopback.engine import serve

import rollway as rw
from rollway.config.parts import RouterPart
from rollway.config.sections import EngineConfig, EnvConfig, ModelConfig, PayloadConfig, WatchConfig
from rollway.envserver import client as envs
from rollway.loop.lag import merge
from rollway.loop.part import start_part
from rollway.loop.run import Watch, run
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.lag import LagStats
from rollway.records.rollout import Scored, Settled
from rollway.records.turn import Sampling
from rollway.wire.messages import Run, Stats

DRAWN = 64
ROUTE_SHAPE = (64, 80)
"""5,120 bytes a token: about 0.5 MB for the hundred tokens a turn adds."""
spawn = multiprocessing.get_context("spawn")


class Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: dict[str, list[float]]
    routed_experts: str


class Reply(msgspec.Struct):
    choices: list[Choice]


def take_in(body: bytes, ids: list[int], logprobs: list[float], routes: list[bytes]) -> None:
    """One reply, linear: parsed, decoded and appended."""
    choice = msgspec.json.decode(body, type=Reply).choices[0]
    routes.append(pybase64.b64decode(choice.routed_experts, validate=True))
    logprobs += choice.logprobs["token_logprobs"]
    ids += choice.token_ids


def threads_worker(pipe: Connection, url: str, rollouts: int, turns: int) -> None:
    """A worker of the kind in use: everything through a large thread pool, lists of Python numbers."""

    async def rollout(session: aiohttp.ClientSession) -> int:
        ids, logprobs, routes = list(range(40)), [0.0] * 40, list[bytes]()
        for turn in range(turns):
            start = max(0, len(ids) - 1) if turn else 0
            asked = msgspec.json.encode({"prompt": ids, "routed_experts_prompt_start": start})
            async with session.post(f"{url}/v1/completions", data=asked) as response:
                body = await response.read()
            await asyncio.to_thread(take_in, body, ids, logprobs, routes)
            ids += [3] * 36
            logprobs += [0.0] * 36
        record = {"ids": ids, "logprobs": logprobs, "routes": routes}
        return len(await asyncio.to_thread(msgspec.msgpack.encode, record))

    async def main(watch: Watch) -> LagStats:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(512))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks = [asyncio.create_task(rollout(session)) for _ in range(rollouts)]
            await asyncio.sleep(1)
            watch.take()
            await asyncio.gather(*tasks)
        return watch.take().lag

    start_s = time.monotonic()
    lag = run("threads", WatchConfig(stall_ms=1e6), main)
    pipe.send((time.monotonic() - start_s, time.process_time(), lag))


def measure_threads(url: str, args: Any) -> dict[str, float]:
    pairs = [spawn.Pipe() for _ in range(args.workers)]
    share = args.rollouts // args.workers
    for _, end in pairs:
        spawn.Process(target=threads_worker, args=(end, url, share, args.turns), daemon=True).start()
    results = [ours.recv() for ours, _ in pairs]
    lag = results[0][2]
    for _, _, other in results[1:]:
        lag = merge(lag, other)
    return figures(args, max(one[0] for one in results), sum(one[1] for one in results), lag)


def figures(args: Any, wall_s: float, cpu_s: float, lag: LagStats) -> dict[str, float]:
    num_turns = args.rollouts * args.turns
    return {
        "turns_per_s": num_turns / wall_s,
        "cpu_ms_per_turn": cpu_s * 1000 / num_turns,
        "lag_p99_ms": lag.p99 * 1000,
        "lag_max_ms": lag.max * 1000,
    }


def cpu_of(pids: list[int]) -> float:
    """CPU seconds of processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def measure_rollway(url: str, args: Any, folder: Path) -> dict[str, dict[str, float]]:
    part = RouterPart(
        env=EnvConfig(
            id=talk.__file__, args={"turns": args.turns}, workers=args.workers,
            concurrency=256 // args.workers,
        ),
        model=ModelConfig(path=str(folder), renderer="qwen3", template={"enable_thinking": False}),
        engine=EngineConfig(request_deadline_s=600),
        engine_url=url,
        payload=PayloadConfig(),
        payload_dir=str(folder),
        log_dir=str(folder),
        seed=0,
        watch=WatchConfig(stall_ms=1000),
    )  # fmt: skip
    entry = "rollway.envserver.router:main"
    async with start_part("bench.router", entry, part, log=folder / "router.log") as router:
        listening = asyncio.ensure_future(router.listen(lambda stats: None, lambda body: None))
        async with envs.connect(await router.ready()) as client:
            up: set[str] = set()
            while len(up) < args.workers:
                match await client.receive():
                    case Stats(stats=stats) if ".w" in stats.process:
                        up.add(stats.process)
            results = await drive(client, args, children(router.pid))
        listening.cancel()
    return results


async def drive(client: envs.EnvClient, args: Any, pids: list[int]) -> dict[str, dict[str, float]]:
    """All rollouts at once; the lag of worker and router after the first second."""
    task = rw.Task(id="0", prompt="go on")
    start_s, start_cpu_s = time.monotonic(), cpu_of(pids)
    for n in range(args.rollouts):
        run_it = Run(RolloutId(f"r{n}"), 1, task, Sampling(DRAWN), PolicyVersion(0))
        await client.send(run_it)
    lags: dict[str, LagStats] = {}
    left = args.rollouts
    wall_s = cpu_s = 0.0
    while left or len(lags) < 2:
        match await client.receive():
            case Settled(outcome=outcome):
                assert isinstance(outcome, Scored), outcome
                left -= 1
                wall_s, cpu_s = time.monotonic() - start_s, cpu_of(pids) - start_cpu_s
            case Stats(stats=stats) if time.monotonic() - start_s > 2:
                kind = "worker" if ".w" in stats.process else "router"
                lags[kind] = merge(lags.get(kind, LagStats()), stats.lag)
    return {kind: figures(args, wall_s, cpu_s, lag) for kind, lag in lags.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--full-routes", action="store_true", help="all positions in every reply")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from rollway.model.tiny import write_tokenizer

    ours, theirs = spawn.Pipe()
    spawn.Process(target=serve, args=(theirs, ROUTE_SHAPE, DRAWN, args.full_routes), daemon=True).start()
    url = f"http://127.0.0.1:{ours.recv()}"
    control_pipe, control_end = spawn.Pipe()
    spawn.Process(target=tick, args=(control_end,), daemon=True).start()
    results: dict[str, dict[str, float]] = {"threads": measure_threads(url, args)}
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        both = asyncio.run(measure_rollway(url, args, Path(folder)))
    results["rollway"], results["router"] = both["worker"], both["router"]
    control_pipe.send("take")
    bare = control_pipe.recv()
    print(f"{args.rollouts} rollouts × {args.turns} turns, {args.workers} worker(s)")
    print(f"{'':10} turns/s  CPU ms/turn  lag p99 ms  lag max ms")
    for name in ("threads", "rollway", "router"):
        row = list(results[name].values())
        print(f"{name:10}{row[0]:8.0f}{row[1]:13.2f}{row[2]:12.1f}{row[3]:12.1f}")
    print(f"{'control':10}{'':21}{bare.p99 * 1000:12.1f}{bare.max * 1000:12.1f}")
    print(f"ratio turns/s: {results['rollway']['turns_per_s'] / results['threads']['turns_per_s']:.1f}")
    control_ms = {"p99_ms": bare.p99 * 1000, "max_ms": bare.max * 1000}
    line = json.dumps({"bench": "envserver", **results, "control": control_ms})
    print(line)
    if args.json:
        args.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
