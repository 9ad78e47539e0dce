"""An env server under load: rollway's, against workers that do the same work in 512 threads.

    python bench/envserver.py [--full] [--seconds 5] [--old FOLDER] [--json FILE]

A loopback engine answers every request after 50 ms with 2 KB, with 0.5 MB of routes, or with all routes
of a conversation (20 MB). 256 to 4,096 rollouts run at any time, and a new one starts where one ends.
*rollway* is the real env server: router, workers, payload files. *threads* is a worker on httpx, on
which the SDKs of the systems in use sit; *threads on aiohttp* is the same on the fastest client in use.
A *control* process only ticks. Everything counts from two seconds on: processes tell their lag once a
second, so that the first second is in none of it. `--old` is a checkout of another version of this
repository: it takes turns with this one in the cases of small and large replies.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import zmq
from loopback import talk
from loopback.control import tick
from loopback.engine import EngineSpec, serve
from loopback.model import write_model
from loopback.processes import Started, children, cpu_s, peak_bytes, started
from loopback.report import QUIET, Bars, arguments, finish, lag_figures, table
from loopback.server import env_server
from loopback.threads import WorkerSpec, threads_worker

import rollway as rw
from rollway.config.sections import EnvConfig, ServerConfig
from rollway.envserver import client as envs
from rollway.loop.watch.lag import merge
from rollway.payload.reader import SegmentReader
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.lag import LagStats
from rollway.records.rollout import Scored, Settled
from rollway.records.turn import Sampling
from rollway.wire.messages import Run, ServerStats

ROOT = Path(__file__).parents[1]
WARM_S = 2.0
MIN_MEASURED_S = 24.0
FREQUENT = msgspec.structs.replace(QUIET, tick_ms=4.0)
"""A p99 is made of the latest hundredth of the ticks."""
COLUMNS = ("turns/s", "CPU ms/turn", "p50 ms", "p99 ms", "max ms", "blocked s", "peak MB")


class Case(msgspec.Struct, frozen=True):
    """One table: what is said, for how many turns, to which engine."""

    name: str
    turns: int
    engine: EngineSpec
    workers: int = 1
    chars: int = 5
    rollouts: int = 256
    has_baselines: bool = False


SMALL = EngineSpec(layers=1, slots=8, drawn=64)
"""8 bytes a token: 2 KB, most of which is JSON."""
DELTA = EngineSpec(layers=640, slots=8, drawn=64)
"""5,120 bytes a token: about 0.5 MB for the hundred tokens a turn adds."""
MIDDLE = EngineSpec(layers=48, slots=8, drawn=64)
WHOLE = EngineSpec(layers=640, slots=8, drawn=64, full=True)
CASES = (
    Case("20 turns", 20, DELTA, has_baselines=True),
    Case("20 turns, 2 workers", 20, DELTA, workers=2, has_baselines=True),
    Case("1 turn", 1, DELTA, has_baselines=True),
    Case("4 turns, 20 MB of routes a reply", 4, WHOLE, chars=1500, has_baselines=True),
    Case("20 turns, small replies", 20, SMALL),
    Case("20 turns, small replies, 1,024 rollouts", 20, SMALL, rollouts=1024),
    Case("20 turns, small replies, 4,096 rollouts", 20, SMALL, rollouts=4096),
    Case("20 turns, 1,024 rollouts", 20, DELTA, rollouts=1024),
    Case("4 turns, 4,096 rollouts", 4, DELTA, rollouts=4096),
    Case("100 turns, 50 KB of routes a reply", 100, MIDDLE),
)
FEW, MANY = CASES[4].name, CASES[6].name
CPU_BARS = {CASES[4].name: 0.55, CASES[0].name: 0.65}
"""CPU of a turn, as a share of what it was when a worker still held a whole core for 4,096 rollouts."""
P99_BAR_MS, MAX_BAR_MS = 6.0, 40.0
"""How much later than the control's a loop may be."""
MEASURE = "--measure"


class Window:
    """What happened between two moments: wall time and CPU of some processes."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._start = self._now()

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), cpu_s(self._pids)

    def figures(self, turns: int, lag: LagStats) -> dict[str, float]:
        wall_s, cpu = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return {
            "turns/s": turns / wall_s,
            "CPU ms/turn": cpu * 1000 / max(1, turns),
            **lag_figures(lag),
            "peak MB": sum(map(peak_bytes, self._pids)) / 1e6,
        }


def threads(case: Case, client: str, engine: Started, url: str, model: str, args: Namespace):
    """Workers whose finished rollouts somebody takes off their hands."""
    context = zmq.Context()
    sink = context.socket(zmq.PULL)
    port = sink.bind_to_random_port("tcp://127.0.0.1")
    spec = WorkerSpec(
        url=url, client=client, model=model, text="go on" * (case.chars // 5), turns=case.turns,
        rollouts=case.rollouts // case.workers, sink=f"tcp://127.0.0.1:{port}",
    )  # fmt: skip
    workers = [Started(threads_worker, (spec,)) for _ in range(case.workers)]
    try:
        while not engine.ask():
            for worker in workers:
                worker.check()
            time.sleep(0.1)
        _drain(sink, WARM_S)
        before = sum(worker.ask()[1] for worker in workers)
        window = Window([worker.pid for worker in workers])
        _drain(sink, args.seconds)
        answers = [worker.ask() for worker in workers]
        lag = LagStats()
        for worker_lag, _ in answers:
            lag = merge(lag, worker_lag)
        return window.figures(sum(turns for _, turns in answers) - before, lag)
    finally:
        for worker in workers:
            worker.end()
        context.destroy(linger=0)


def _drain(sink: zmq.Socket, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        if sink.poll(left_s * 1000):
            sink.recv(copy=False)


async def rollway(
    case: Case, engine: Started, control: Started, url: str, folder: Path, seconds: float
):
    env = EnvConfig(
        id=talk.__file__,
        args={"turns": case.turns, "chars": case.chars},
        server=ServerConfig(workers=case.workers, concurrency=case.rollouts // case.workers),
    )
    async with env_server(env, url, folder, FREQUENT) as server:
        driver = Driver(server.client, case, folder)
        return await driver.measure(engine, control, children(server.pid), seconds)


class Driver:
    """Keeps rollouts running, removes what they wrote, and adds up the lag of worker and router."""

    def __init__(self, client: envs.EnvClient, case: Case, folder: Path) -> None:
        self._client = client
        self._case = case
        self._reader = SegmentReader(folder)
        self._lags: dict[str, LagStats] = {}
        self._number = 0
        self._segments: dict[str, None] = {}

    async def measure(
        self, engine: Started, control: Started, pids: list[int], seconds: float
    ):
        for n in range(self._case.rollouts):
            await self._start(1 + n % self._case.turns)
        await self._serve(WARM_S)
        self._lags.clear()
        control.ask()
        window, before = Window(pids), engine.ask()
        await self._serve(max(MIN_MEASURED_S, seconds))
        turns = engine.ask() - before
        lags = self._lags | {"control": control.ask()}
        over = {
            f"{name} lag {key} over the control's": _over(lags, name, key)
            for name in ("worker", "router")
            for key in ("p99 ms", "max ms")
        }
        rows = {
            "rollway": window.figures(turns, lags["worker"]),
            "rollway's router": lag_figures(lags["router"]),
            "control beside rollway": lag_figures(lags["control"]),
        }
        return rows, over

    async def _serve(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    message = await self._client.receive()
            except TimeoutError:
                return
            match message:
                case Settled(outcome=outcome):
                    assert isinstance(outcome, Scored), outcome
                    await self._start(self._case.turns)
                    self._forget(outcome.ref.segment)
                case ServerStats(stats=stats):
                    kind = "worker" if ".w" in stats.process else "router"
                    self._lags[kind] = merge(self._lags.get(kind, LagStats()), stats.lag)

    async def _start(self, turns: int) -> None:
        self._number += 1
        task = rw.Task(
            id=str(self._number), prompt="go on" * (self._case.chars // 5), answer=str(turns)
        )
        id = RolloutId(f"r{self._number}")
        await self._client.send(Run(id, 1, task, Sampling(DELTA.drawn), PolicyVersion(0), 0))

    def _forget(self, segment: str) -> None:
        """As the orchestrator would: segments go when newer ones are written."""
        if segment not in self._segments:
            self._segments[segment] = None
            for old in list(self._segments)[: -4 * self._case.workers]:
                self._reader.remove(old)
                del self._segments[old]


def _over(lags: dict[str, LagStats], name: str, key: str) -> float:
    return lag_figures(lags[name])[key] - lag_figures(lags["control"])[key]


def measure(
    case: Case, args: Namespace
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Candidate and baselines one after the other, against one engine and beside one control. Gigabytes
    that a baseline gives back hold the machine up, so the candidate does not come after it."""
    with (
        started(serve, case.engine) as engine,
        started(tick, FREQUENT) as control,
        TemporaryDirectory() as folder,
    ):
        write_model(Path(folder), case.engine)
        url = f"http://127.0.0.1:{engine.pipe.recv()}"
        control.ask()
        seconds = args.seconds
        ours, over = asyncio.run(rollway(case, engine, control, url, Path(folder), seconds))
        rows = {}
        if case.has_baselines:
            for name, client in (("threads", "httpx"), ("threads on aiohttp", "aiohttp")):
                rows[name] = threads(case, client, engine, url, folder, args)
            rows["control beside threads"] = lag_figures(control.ask())
    return rows | ours, over


def of_version(tree: Path, case: Case, seconds: float) -> dict[str, float]:
    """Return the figures of the package in another checkout."""
    command = [sys.executable, __file__, MEASURE, str(CASES.index(case)), str(seconds)]
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_versions(old: Path, args: Namespace, bars: Bars) -> dict[str, float]:
    """Measure CPU a turn of another version and of this one, taking turns."""
    ratios = {}
    for name, bar in CPU_BARS.items():
        case = next(case for case in CASES if case.name == name)
        cpu: dict[Path, list[float]] = {old: [], ROOT: []}
        for _ in range(3):
            for tree, found in cpu.items():
                found.append(of_version(tree, case, args.seconds)["CPU ms/turn"])
        ratios[name] = median(cpu[ROOT]) / median(cpu[old])
        print(f"\n{name}: CPU a turn is {ratios[name]:.2f} of the other version's {cpu[old]}")
        bars.at_most(
            f"CPU a turn of '{name}', as a share of the other version's", ratios[name], bar
        )
    return ratios


def judge(
    case: Case, rows: dict[str, dict[str, float]], over: dict[str, float], bars: Bars
) -> None:
    """Print how much later than the control's the loops are, and how much faster than the baselines."""
    for baseline in ("threads", "threads on aiohttp") if case.has_baselines else ():
        theirs = rows[baseline]["turns/s"]
        text = f"{rows['rollway']['turns/s'] / theirs:.1f}" if theirs else "they took in none"
        print(f"ratio turns/s to {baseline}: {text}")
    for name, value in over.items():
        print(f"{name}: {value:.1f}")
        bars.at_most(
            f"{case.name}: {name}", value, P99_BAR_MS if "p99" in name else MAX_BAR_MS
        )


def main() -> None:
    args = arguments(
        __doc__,
        seconds=(5.0, "seconds of a baseline"),
        old=("", "a checkout of another version"),
    )
    if args.full:
        args.seconds = max(args.seconds, 30.0)
    bars, figures = Bars(args), {}
    for case in CASES:
        print(f"\n{case.rollouts:,} rollouts at a time, {case.name}, {case.workers} worker")
        rows, over = measure(case, args)
        figures[case.name] = {**rows, "over": over}
        table(rows, COLUMNS)
        judge(case, rows, over, bars)
    few, many = (figures[name]["rollway"]["turns/s"] for name in (FEW, MANY))
    print(f"\nturns/s of 4,096 rollouts, as a share of those of 256: {many / few:.2f}")
    bars.at_least("turns/s of 4,096 rollouts, as a share of those of 256", many / few, 0.97)
    if args.old:
        figures["versions"] = compare_versions(Path(args.old).resolve(), args, bars)
    finish("envserver", figures, args.json)
    bars.check()


if __name__ == "__main__":
    if MEASURE in sys.argv:
        alone = msgspec.structs.replace(CASES[int(sys.argv[-2])], has_baselines=False)
        found, _ = measure(alone, Namespace(seconds=float(sys.argv[-1])))
        print(json.dumps(found["rollway"]))
    else:
        main()
