"""One step, from the engine's reply bytes to a batch the trainer has opened, by three strategies.

    python bench/step.py [--full] [--rollouts 32] [--turns 10] [--tokens 4000] [--bytes 384]
                         [--old FOLDER]

R rollouts of T turns grow to L tokens each. Every reply carries the routes of all positions so far, in
base64, as an engine without prefix omission sends them. --full is 256 × 20 × 18,000 tokens × 384 bytes:
25 GB of replies. The engine repeats T distinct replies.

inline    everything on the loop: replies merged again at every turn, msgpack of Python lists, base64
threads   the same work through asyncio.to_thread with 512 threads, merged linearly
rollway   the real env server and the real orchestrator, and a trainer that opens every row

Read "copied" as bytes moved by user code per byte of reply, counted by hand at each copy (see COPIES).
"boundary" is the time from the last rollout settled to the batch opened by the trainer. A *control*
process with a bare loop ticks beside each. rollway runs three times, and its median counts. Then a step
of few rollouts with 3,072 bytes a token. `--old` is a checkout of another version of this repository,
which takes turns with this one.
"""

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any, NamedTuple

from loopback import talk
from loopback.batch import old_orchestrator, old_trainer
from loopback.control import tick
from loopback.engine import EngineSpec, serve
from loopback.model import write_model
from loopback.opener import opening_trainer
from loopback.processes import Started, children, cpu_s, peak_bytes, started
from loopback.report import QUIET, Bars, arguments, finish, lag_figures, table
from loopback.threads import WorkerSpec, threads_worker

from rollway.config.sections import (
    EngineConfig,
    EnvConfig,
    FiltersConfig,
    ModelConfig,
    OrchestratorConfig,
    PayloadConfig,
    ServerConfig,
    TransportConfig,
)
from rollway.config.specs import CoreSpec, EnvAddress, OrchestratorSpec, RouterSpec
from rollway.envserver import client as envs
from rollway.loop.processes.part import Part, start_part
from rollway.loop.watch.lag import merge
from rollway.records.ids import Step
from rollway.records.lag import LagStats, ProcessStats
from rollway.records.turn import Sampling
from rollway.rundir.rundir import RunDir
from rollway.wire.messages import ServerStats

FULL = {"rollouts": 256, "turns": 20, "tokens": 18_000, "bytes": 384}
ROOT = Path(__file__).parents[1]
MEASURE, COMPARED = "--measure", ("wall s", "CPU s/rollout")
MOST_GROWN_MB = 300.0
SCAFFOLD = 20
"""Tokens of a turn that the renderer adds around a message."""
SETTLE_S, MOST_REST_S = 2.0, 8.0
COLUMNS = ("p50 ms", "p99 ms", "max ms", "blocked s", "grew MB")
COPIES = {
    "inline": "body whole, JSON string, base64, merged array (T/2 times), base64, msgpack; then the "
    "same backwards, array, bytes, msgpack, file, and back",
    "threads": "the same with one merge",
    "rollway": "of new positions only: socket to a warm 64 KB buffer, spool, base64, file; the rest is "
    "thrown away in the kernel",
}


def copied(strategy: str, turns: int) -> float:
    """Bytes copied per byte of reply; the rows are 2 × 3/4 / (T + 1) of the replies."""
    rows = 1.5 / (turns + 1)
    if strategy == "rollway":
        return rows * (4 / 3 + 4 / 3 + 1 + 1)
    merges = turns / 2 if strategy == "inline" else 1
    worker = 1 + 1 + 0.75 + rows * (merges + 1 + 4 / 3 + 4 / 3)
    return worker + rows * (4 / 3 + 4 / 3 + 1 + 1 + 1 + 1 + 1 + 1)


class Workload:
    """Sizes that make every turn add as many tokens as it must."""

    def __init__(self, args: Namespace) -> None:
        self.rollouts, self.turns = args.rollouts, args.turns
        per_turn = args.tokens // args.turns
        self.drawn = per_turn // 2
        self.chars = per_turn - self.drawn - SCAFFOLD
        self.bytes = args.bytes
        self.engine = EngineSpec(
            layers=args.bytes // 8, slots=8, drawn=self.drawn, full=True, latency_s=0.0
        )

    @property
    def reply_gb(self) -> float:
        per_turn = self.drawn + self.chars + SCAFFOLD
        positions = per_turn * self.turns * (self.turns + 1) / 2
        return self.rollouts * positions * self.bytes * 4 / 3 / 1e9

    @property
    def env(self) -> EnvConfig:
        return EnvConfig(
            id=talk.__file__,
            args={"turns": self.turns, "chars": self.chars},
            server=ServerConfig(
                workers=1, concurrency=self.rollouts, rollout_deadline_s=3600
            ),
        )

    @property
    def orchestrator(self) -> OrchestratorConfig:
        return OrchestratorConfig(
            batch_size=self.rollouts,
            group_size=8,
            max_in_flight=self.rollouts,
        )

    @property
    def max_outstanding(self) -> int:
        return 2 * self.rollouts


def old(strategy: str, work: Workload, url: str, folder: Path) -> dict[str, Any]:
    """*inline* or *threads*: a worker, an orchestrator, a trainer."""
    inline, batch = strategy == "inline", str(folder / "batch.msgpack")
    with (
        started(old_orchestrator, work.rollouts, batch, inline) as orchestrator,
        started(old_trainer) as trainer,
    ):
        sink = f"tcp://127.0.0.1:{orchestrator.pipe.recv()}"
        spec = WorkerSpec(
            url=url, client="aiohttp", model=str(folder), text="go on" * (work.chars // 5),
            turns=work.turns, rollouts=work.rollouts, sink=sink, inline=inline, once=True,
        )  # fmt: skip
        with started(threads_worker, spec) as worker:
            worker.ask()
            everyone = {
                "worker": worker.pid,
                "orchestrator": orchestrator.pid,
                "trainer": trainer.pid,
            }
            before = Before(everyone)
            while not orchestrator.pipe.poll(0.2):
                worker.check()
                orchestrator.check()
            settled_s = orchestrator.pipe.recv()
            _, opened_s = trainer.ask(batch)
            lags = {"worker": worker.ask()[0], "orchestrator": orchestrator.pipe.recv()}
            return before.figures(lags, work, settled_s, opened_s)


class Before:
    """The clock, CPU and memory when the work begins."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._start_s = time.time()
        self._cpu_s = cpu_s(pids.values())
        self._peaks = {name: peak_bytes(pid) for name, pid in pids.items()}

    def figures(
        self, lags: dict[str, LagStats], work: Workload, settled_s: float, opened_s: float
    ) -> dict[str, Any]:
        rows = {}
        for name, pid in self._pids.items():
            lag = lag_figures(lags[name]) if name in lags else {}
            rows[name] = {**lag, "grew MB": (peak_bytes(pid) - self._peaks[name]) / 1e6}
        return {
            "processes": rows,
            "boundary s": opened_s - settled_s,
            "wall s": opened_s - self._start_s,
            "CPU s/rollout": (cpu_s(self._pids.values()) - self._cpu_s) / work.rollouts,
        }


class Plane(NamedTuple):
    """rollway's processes at work, and the trainer that opens what they ship."""

    run: RunDir
    trainer: Started
    orchestrator: Part
    pids: dict[str, int]


@asynccontextmanager
async def plane(
    work: Workload,
    url: str,
    folder: Path,
    steps: int,
    on_stats: Callable[[ProcessStats], None],
) -> AsyncIterator[Plane]:
    """The real router, worker and orchestrator. Leaving the block ends them."""
    run = RunDir(folder / "run")
    run.make_folders()
    with started(opening_trainer, str(run.path), steps) as trainer:
        trainer.pipe.recv()
        part = router_spec(work, url, folder, run)
        async with start_part(
            "talk.router",
            "rollway.envserver.router.router:main",
            part,
            log=run.logs / "router.log",
        ) as router:
            listening = asyncio.ensure_future(router.listen(on_stats, lambda body: None))
            address = await router.ready()
            await worker_is_up(address)
            whole = orchestrator_spec(work, url, run, address, steps)
            async with start_part(
                "orchestrator",
                "rollway.orchestrator.shell.main:main",
                whole,
                log=run.logs / "o.log",
            ) as orchestrator:
                workers = {f"worker {n}": pid for n, pid in enumerate(children(router.pid))}
                pids = {"worker": workers.pop("worker 0"), **workers, "router": router.pid,
                        "orchestrator": orchestrator.pid, "trainer": trainer.pid}  # fmt: skip
                yield Plane(run, trainer, orchestrator, pids)
            listening.cancel()


async def rollway(work: Workload, url: str, folder: Path) -> dict[str, Any]:
    """The real processes, with a trainer that opens every row of the manifest."""
    lags: dict[str, LagStats] = {}

    def on_stats(stats: ProcessStats) -> None:
        name = "worker" if ".w" in stats.process else stats.process.rpartition(".")[2]
        lags[name] = merge(lags.get(name, LagStats()), stats.lag)

    async with plane(work, url, folder, 1, on_stats) as up:
        ending = asyncio.ensure_future(up.orchestrator.listen(on_stats, lambda body: None))
        await up.orchestrator.ready()
        before = Before(up.pids)
        lags.clear()
        opened_s = await asyncio.to_thread(up.trainer.pipe.recv)
        await asyncio.sleep(1.2)  # statistics come once a second
        figures = before.figures(lags, work, 0.0, opened_s)
        up.trainer.pipe.send("publish")
        await ending
    with closing(sqlite3.connect(up.run.ledger)) as db:
        ((settled_s,),) = db.execute("SELECT max(settled_s) FROM rollouts WHERE step = 1")
    figures["boundary s"] = opened_s - settled_s
    left = list(up.run.payload.iterdir())
    assert not left, f"segments left after release: {left}"
    return figures


async def worker_is_up(address: str) -> None:
    async with envs.connect(address) as client:
        while True:
            match await client.receive():
                case ServerStats(stats=stats) if ".w" in stats.process:
                    return


def router_spec(work: Workload, url: str, folder: Path, run: RunDir) -> RouterSpec:
    return RouterSpec(
        env=work.env,
        model=ModelConfig(path=str(folder), renderer="qwen3", template={"enable_thinking": False}),
        engine=EngineConfig(request_deadline_s=3600, routes=True),
        engine_urls=(url,),
        payload=PayloadConfig(),
        payload_dir=str(run.payload),
        log_dir=str(run.logs),
        seed=0,
        watch=QUIET,
    )  # fmt: skip


def orchestrator_spec(
    work: Workload, url: str, run: RunDir, address: str, steps: int = 1
) -> OrchestratorSpec:
    return OrchestratorSpec(
        core=CoreSpec(
            orchestrator=work.orchestrator,
            filters=FiltersConfig(zero_advantage="monitor"),
            ratios={work.env.id: 1.0},
            max_steps=steps,
            max_outstanding=work.max_outstanding,
            payload_bytes=PayloadConfig().budget_mb << 20,
            micro_batch_tokens=1 << 20,
        ),
        sampling=Sampling(work.drawn),
        envs=(EnvAddress(work.env.id, address),),
        engine_urls=(url,),
        engine=EngineConfig(request_deadline_s=3600, routes=True),
        weights="",
        model_path="",
        must_push=False,
        payload=PayloadConfig(),
        transport=TransportConfig(),
        first_step=Step(1),
        run_dir=str(run.path),
        watch=QUIET,
    )  # fmt: skip


def measure(strategy: str, work: Workload, url: str, control: Any) -> dict[str, Any]:
    folder = Path(mkdtemp(prefix="rollway-bench-"))
    try:
        write_model(folder, work.engine)
        os.sync()  # no measurement pays for what another wrote
        time.sleep(
            SETTLE_S + min(MOST_REST_S, work.reply_gb)
        )  # nor for the memory it gives back
        control.ask()
        if strategy == "rollway":
            figures = asyncio.run(rollway(work, url, folder))
        else:
            figures = old(strategy, work, url, folder)
        figures["processes"]["control"] = lag_figures(control.ask())
        figures["copied"] = copied(strategy, work.turns)
        return figures
    finally:
        shutil.rmtree(folder)


ORDER = ("rollway", "rollway", "rollway", "threads", "inline")
"""Three of ours: a single one is at the mercy of the machine's moods. They come first: for a while after
the others have freed 12 GB, a bare loop is late by hundreds of milliseconds."""


def compare(figures: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The median of our passes, each against the control beside it."""
    ratios = [compare_one(figures["threads"][0], figure) for figure in figures["rollway"]]
    return {name: median(ratio[name] for ratio in ratios) for name in ratios[0]}


def compare_one(threads: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    their_lag, our_lag = (
        threads["processes"]["orchestrator"],
        ours["processes"]["orchestrator"],
    )
    control = ours["processes"]["control"]
    return {
        "boundary, threads / rollway": threads["boundary s"] / ours["boundary s"],
        "orchestrator max lag, threads / rollway": their_lag["max ms"] / our_lag["max ms"],
        "CPU per rollout, threads / rollway": threads["CPU s/rollout"]
        / ours["CPU s/rollout"],
        "orchestrator p99 over the control's, ms": our_lag["p99 ms"] - control["p99 ms"],
        "orchestrator max over the control's, ms": our_lag["max ms"] - control["max ms"],
        "orchestrator memory growth, MB": our_lag["grew MB"],
    }


def judge(figure: dict[str, Any], bars: Bars) -> None:
    grew = figure["processes"]["worker"]["grew MB"]
    bars.at_most("what the worker grew by, in MB,", grew, MOST_GROWN_MB)


def measure_wide(args: Namespace, bars: Bars) -> dict[str, Any]:
    """One step with routes of which each token has eight times as many bytes."""
    rollouts, wide = args.rollouts if args.full else args.rollouts // 8, 8 * args.bytes
    work = Workload(Namespace(**{**vars(args), "rollouts": rollouts, "bytes": wide}))
    with started(serve, work.engine) as engine, started(tick) as control:
        url = f"http://127.0.0.1:{engine.pipe.recv()}"
        figure = measure("rollway", work, url, control)
    print(
        f"\n{rollouts} rollouts with {wide:,} bytes a token, {work.reply_gb:.1f} GB of replies: wall "
        f"{figure['wall s']:.1f} s, {figure['CPU s/rollout'] * 1000:.0f} ms CPU a rollout"
    )
    table(figure["processes"], COLUMNS)
    judge(figure, bars)
    return figure


def of_version(tree: Path, args: Namespace) -> dict[str, float]:
    """Return what a step costs the package of another checkout."""
    sizes = [str(getattr(args, name)) for name in FULL]
    command = [sys.executable, __file__, MEASURE, *sizes]
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_versions(old: Path, args: Namespace, bars: Bars) -> dict[str, float]:
    """Measure time and CPU of a step of another version and of this one, taking turns."""
    found: dict[Path, list[dict[str, float]]] = {old: [], ROOT: []}
    for _ in range(3):
        for tree, figures in found.items():
            figures.append(of_version(tree, args))
    ratios = {}
    for key in COMPARED:
        ours, theirs = (median(figure[key] for figure in found[tree]) for tree in (ROOT, old))
        ratios[f"{key}, as a share of the other version's"] = ours / theirs
        bars.at_most(f"{key}, as a share of the other version's,", ours / theirs, 1.0)
    return ratios


def measure_once(sizes: list[str]) -> dict[str, float]:
    work = Workload(Namespace(**dict(zip(FULL, map(int, sizes), strict=True))))
    with started(serve, work.engine) as engine, started(tick) as control:
        url = f"http://127.0.0.1:{engine.pipe.recv()}"
        figure = measure("rollway", work, url, control)
    return {key: figure[key] for key in COMPARED}


def main() -> None:
    args = arguments(
        __doc__, rollouts=(32, "rollouts"), turns=(10, "turns of a rollout"),
        tokens=(4000, "tokens of a rollout"), bytes=(384, "bytes of routes a token"),
        old=("", "a checkout of another version"),
    )  # fmt: skip
    if args.full:
        args = Namespace(**{**vars(args), **FULL})
    work = Workload(args)
    print(
        f"{args.rollouts} rollouts × {args.turns} turns × {args.tokens:,} tokens × {args.bytes} B: "
        f"{work.reply_gb:.1f} GB of replies"
    )
    figures: dict[str, list[dict[str, Any]]] = {}
    bars = Bars(args)
    with started(serve, work.engine) as engine, started(tick) as control:
        url = f"http://127.0.0.1:{engine.pipe.recv()}"
        for strategy in ORDER:
            figure = measure(strategy, work, url, control)
            figures.setdefault(strategy, []).append(figure)
            print(
                f"\n{strategy}: boundary {figure['boundary s']:.3f} s, wall {figure['wall s']:.1f} s, "
                f"{figure['CPU s/rollout'] * 1000:.0f} ms CPU a rollout, "
                f"{figure['copied']:.1f} bytes copied a byte"
            )
            table(figure["processes"], COLUMNS)
    wide = measure_wide(args, bars)
    print("\nmedians of rollway's passes:")
    ratios = compare(figures)
    for name, value in ratios.items():
        print(f"{name}: {value:.3g}")
    for figure in figures["rollway"]:
        judge(figure, bars)
    if args.old:
        ratios |= compare_versions(Path(args.old).resolve(), args, bars)
    finish("step", {**figures, "wide": wide, "ratios": ratios}, args.json)
    bars.check()


if __name__ == "__main__":
    if MEASURE in sys.argv:
        print(json.dumps(measure_once(sys.argv[-len(FULL) :])))
    else:
        main()
