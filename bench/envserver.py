"""An env server under load: rollway's, against workers that do the same work in 512 threads.

    python bench/envserver.py [--full] [--seconds 5] [--rollouts 256] [--json FILE]

A loopback engine answers every request after 50 ms with 0.5 MB of routes, or with all of them (20 MB) in
the last case. 256 rollouts run at any time, and a new one starts where one ends. *rollway* is the real
env server: router, workers, payload files. *threads* is a worker on httpx, on which the SDKs of the
systems in use sit; *threads on aiohttp* is the same on the fastest client in use. A *control* process
only ticks. Everything counts from two seconds on: processes tell their lag once a second, so that the
first second is in none of it.
"""

import asyncio
import time
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import zmq
from loopback import talk
from loopback.control import tick
from loopback.engine import EngineSpec, serve
from loopback.model import write_model
from loopback.processes import Started, children, cpu_s, peak_bytes, started
from loopback.report import QUIET, arguments, finish, lag_figures, table
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

WARM_S = 2.0
MIN_MEASURED_S = 24.0
FREQUENT = msgspec.structs.replace(QUIET, tick_ms=4.0)
"""A p99 is made of the latest hundredth of the ticks."""
COLUMNS = ("turns/s", "CPU ms/turn", "p50 ms", "p99 ms", "max ms", "blocked s", "peak MB")


class Case(msgspec.Struct, frozen=True):
    """One table: what is said, for how many turns, to which engine."""

    name: str
    turns: int
    workers: int
    chars: int
    engine: EngineSpec


DELTA = EngineSpec(layers=640, slots=8, drawn=64)
"""5,120 bytes a token: about 0.5 MB for the hundred tokens a turn adds."""
WHOLE = EngineSpec(layers=640, slots=8, drawn=64, full=True)
CASES = (
    Case("20 turns, 1 worker", 20, 1, 5, DELTA),
    Case("20 turns, 2 workers", 20, 2, 5, DELTA),
    Case("1 turn, 1 worker", 1, 1, 5, DELTA),
    Case("4 turns, 1 worker, 20 MB of routes a reply", 4, 1, 1500, WHOLE),
)


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
        rollouts=args.rollouts // case.workers, sink=f"tcp://127.0.0.1:{port}",
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
    case: Case, engine: Started, control: Started, url: str, folder: Path, args: Namespace
):
    env = EnvConfig(
        id=talk.__file__,
        args={"turns": case.turns, "chars": case.chars},
        server=ServerConfig(workers=case.workers, concurrency=args.rollouts // case.workers),
    )
    async with env_server(env, url, folder, FREQUENT) as server:
        driver = Driver(server.client, case, args.rollouts, folder)
        return await driver.measure(engine, control, children(server.pid), args.seconds)


class Driver:
    """Keeps rollouts running, removes what they wrote, and adds up the lag of worker and router."""

    def __init__(
        self, client: envs.EnvClient, case: Case, rollouts: int, folder: Path
    ) -> None:
        self._client = client
        self._case = case
        self._rollouts = rollouts
        self._reader = SegmentReader(folder)
        self._lags: dict[str, LagStats] = {}
        self._number = 0
        self._segments: dict[str, None] = {}

    async def measure(
        self, engine: Started, control: Started, pids: list[int], seconds: float
    ):
        for n in range(self._rollouts):
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
        ours, over = asyncio.run(rollway(case, engine, control, url, Path(folder), args))
        rows = {}
        for name, client in (("threads", "httpx"), ("threads on aiohttp", "aiohttp")):
            rows[name] = threads(case, client, engine, url, folder, args)
        rows["control beside threads"] = lag_figures(control.ask())
    return rows | ours, over


def main() -> None:
    args = arguments(
        __doc__, seconds=(5.0, "seconds of a baseline"), rollouts=(256, "rollouts at a time")
    )
    if args.full:
        args.seconds = max(args.seconds, 30.0)
    figures = {}
    for case in CASES:
        print(f"\n{args.rollouts} rollouts at a time, {case.name}")
        rows, over = measure(case, args)
        figures[case.name] = {**rows, "over": over}
        table(rows, COLUMNS)
        for baseline in ("threads", "threads on aiohttp"):
            theirs = rows[baseline]["turns/s"]
            ratio = (
                f"{rows['rollway']['turns/s'] / theirs:.1f}"
                if theirs
                else "they took in none"
            )
            print(f"ratio turns/s to {baseline}: {ratio}")
        for name, value in over.items():
            print(f"{name}: {value:.1f}")
    finish("envserver", figures, args.json)


if __name__ == "__main__":
    main()
