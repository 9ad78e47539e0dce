"""The longest time for which anything holds a loop: a worker's and a router's, at every size.

    python bench/holds.py [--full] [--seconds 8] [--old FOLDER] [--json FILE]

Rollouts of one kind run again and again: tasks and transcripts of 15 MB, 200 turns, 500 rows, output of
tools that is longer than the model's context, and 4,096 at once. Beside the server ticks a control. A
loop may be held for 5 ms longer than the control. A task of a million numbers is only measured: no call
makes their objects in slices. `--old` is a checkout of another version of this repository, which is
measured after this one.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from loopback import sized
from loopback.control import tick
from loopback.engine import EngineSpec, serve
from loopback.model import write_model
from loopback.processes import Started, started
from loopback.report import QUIET, Bars, arguments, finish, lag_figures, table
from loopback.server import Server, env_server

import rollway as rw
from rollway.config.sections import EnvConfig, ServerConfig
from rollway.loop.watch.lag import merge
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.lag import LagStats
from rollway.records.rollout import Failed, Settled
from rollway.records.turn import Sampling
from rollway.wire.messages import Run, ServerStats

ROOT = Path(__file__).parents[1]
MEASURE = "--measure"
HELD_BAR_MS = 5.0
CONTEXT = 32_768
FREQUENT = msgspec.structs.replace(QUIET, tick_ms=2.0)
ENGINE = EngineSpec(layers=48, slots=8, drawn=64, latency_s=0.02, context=CONTEXT)


class Case(msgspec.Struct, frozen=True):
    name: str
    at_once: int
    info: Any = None
    is_judged: bool = True


CASES = (
    Case("200 turns", 8),
    Case("500 rows", 4),
    Case("a transcript of 15 MB", 2),
    Case("15 MB of tool output", 2),
    Case("a task with a text of 15 MB", 2, {"text": "so it goes " * (sized.LARGE // 11)}),
    Case(
        "a task of 1,000,000 numbers", 2, {"numbers": list(range(1_000_000))}, is_judged=False
    ),
    Case("4,096 at once", 4096),
)


class Driver:
    """Keeps rollouts of one case running."""

    def __init__(self, server: Server, case: Case) -> None:
        self._client = server.client
        self._case = case
        self._number = 0
        self.num_ended = 0
        self.lags: dict[str, LagStats] = {}

    async def start(self) -> None:
        self._number += 1
        info = {"info": self._case.info} if self._case.info else {}
        task = rw.Task(id=str(self._number), prompt="go on", answer=self._case.name, **info)
        name = RolloutId(f"r{self._number}")
        await self._client.send(
            Run(name, 1, task, Sampling(ENGINE.drawn), PolicyVersion(0), 0)
        )

    async def serve(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    message = await self._client.receive()
            except TimeoutError:
                return
            match message:
                case Settled(outcome=Failed() as failed):
                    raise SystemExit(f"{self._case.name}: {failed}")
                case Settled():
                    self.num_ended += 1
                    await self.start()
                case ServerStats(stats=stats):
                    kind = "worker" if ".w" in stats.process else "router"
                    self.lags[kind] = merge(self.lags.get(kind, LagStats()), stats.lag)


async def run(
    case: Case, url: str, folder: Path, control: Started, seconds: float
) -> dict[str, dict[str, float]]:
    config = ServerConfig(workers=1, concurrency=case.at_once, rollout_deadline_s=600)
    env = EnvConfig(id=sized.__file__, server=config)
    async with env_server(env, url, folder, FREQUENT) as server:
        driver = Driver(server, case)
        for _ in range(case.at_once):
            await driver.start()
        await driver.serve(3.0)
        driver.lags.clear()
        control.ask()
        await driver.serve(seconds)
    lags = driver.lags | {"control": control.ask()}
    figures = {name: lag_figures(lag) for name, lag in lags.items()}
    figures["worker"]["ended"] = driver.num_ended
    return figures


def measure(seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """Return the lags of worker, router and control in each case."""
    figures = {}
    with (
        started(serve, ENGINE) as engine,
        started(tick, FREQUENT) as control,
        TemporaryDirectory(prefix="rollway-bench-") as name,
    ):
        write_model(Path(name), ENGINE)
        url = f"http://127.0.0.1:{engine.pipe.recv()}"
        for case in CASES:
            figures[case.name] = asyncio.run(run(case, url, Path(name), control, seconds))
    return figures


def of_version(tree: Path, seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of the package in another checkout."""
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, __file__, MEASURE, str(seconds)]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, dict[str, dict[str, float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def judge(figures: dict[str, dict[str, dict[str, float]]], bars: Bars) -> None:
    for case in (case.name for case in CASES if case.is_judged):
        lags = figures[case]
        for name in ("worker", "router"):
            over = lags[name]["max ms"] - lags["control"]["max ms"]
            bars.at_most(
                f"{case}: longest hold of the {name} over the control's, in ms,",
                over,
                HELD_BAR_MS,
            )


def show(figures: dict[str, dict[str, dict[str, float]]]) -> None:
    rows = {
        f"{case}: {name}": lag for case, lags in figures.items() for name, lag in lags.items()
    }
    table(rows, ("p50 ms", "p99 ms", "max ms", "ended"))


def main() -> None:
    args = arguments(
        __doc__,
        seconds=(8.0, "seconds of each case"),
        old=("", "a checkout of another version"),
    )
    if args.full:
        args = Namespace(**{**vars(args), "seconds": max(30.0, args.seconds)})
    bars, figures = Bars(args), measure(args.seconds)
    show(figures)
    judge(figures, bars)
    other = of_version(Path(args.old).resolve(), args.seconds) if args.old else {}
    if other:
        print(f"\n{args.old}")
        show(other)
    finish("holds", {"figures": figures, "other version": other}, args.json)
    bars.check()


if __name__ == "__main__":
    if MEASURE in sys.argv:
        print(json.dumps(measure(float(sys.argv[-1]))))
    else:
        main()
