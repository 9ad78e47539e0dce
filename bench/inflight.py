"""Two thousand rollouts in flight, two hundred of them settling every second: how late is the
orchestrator's loop, and what does it cost?

    python bench/inflight.py [--full] [--rollouts 2000] [--seconds 20]

The real env server, orchestrator and ledger. Every rollout takes ten seconds, asks a loopback engine
once and settles; batches of 256 are shipped to a trainer that opens them and publishes at once. Beside
them ticks a control, a process with nothing on its loop. --full watches for a minute.
"""

import asyncio
import time
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from loopback import nap
from loopback.control import tick
from loopback.engine import EngineSpec, serve
from loopback.processes import Started, cpu_s, started
from loopback.report import Bars, arguments, finish, lag_figures, table
from step import Plane, Workload, plane

from rollway.config.sections import EnvConfig, OrchestratorConfig, ServerConfig
from rollway.loop.watch.lag import merge
from rollway.model.tiny import write_tokenizer
from rollway.records.lag import LagStats, ProcessStats

NAP_S = 10.0
BATCH, WORKERS = 256, 2
P99_BAR_MS, MAX_BAR_MS = 6.0, 40.0
"""How much later than the control's a loop may be."""
WARM_S = 15.0
"""Until rollouts settle as fast as they start, and not all at once."""
COLUMNS = ("p50 ms", "p99 ms", "max ms", "blocked s")


class Crowd(Workload):
    """Many small rollouts that take their time, instead of few large ones."""

    def __init__(self, rollouts: int) -> None:
        self.rollouts, self.drawn = rollouts, 8
        self.engine = EngineSpec(layers=4, slots=4, drawn=self.drawn, latency_s=0.005)

    @property
    def env(self) -> EnvConfig:
        return EnvConfig(
            id=nap.__file__,
            args={"seconds": NAP_S, "spread": NAP_S / 2},
            server=ServerConfig(workers=WORKERS, concurrency=-(-self.rollouts // WORKERS)),
        )

    @property
    def orchestrator(self) -> OrchestratorConfig:
        return OrchestratorConfig(
            batch_size=BATCH, group_size=8, max_in_flight=self.rollouts, max_off_policy_steps=64,
        )  # fmt: skip

    @property
    def max_outstanding(self) -> int:
        return self.rollouts + 4 * BATCH


class Watched:
    """The lag of each process since it was last cleared."""

    def __init__(self) -> None:
        self.lags: dict[str, LagStats] = {}

    def on_stats(self, stats: ProcessStats) -> None:
        name = "worker" if ".w" in stats.process else stats.process.rpartition(".")[2]
        self.lags[name] = merge(self.lags.get(name, LagStats()), stats.lag)


async def publish_all(trainer: Started, shipped: list[float]) -> None:
    """Every version as soon as its batch lies open."""
    while True:
        shipped.append(await asyncio.to_thread(trainer.pipe.recv))
        trainer.pipe.send("publish")


async def watch(
    up: Plane, watched: Watched, control: Started, seconds: float
) -> dict[str, object]:
    shipped: list[float] = []
    publishing = asyncio.ensure_future(publish_all(up.trainer, shipped))
    listening = asyncio.ensure_future(
        up.orchestrator.listen(watched.on_stats, lambda body: None)
    )
    await up.orchestrator.ready()
    await asyncio.sleep(WARM_S)
    pid, start_s = up.pids["orchestrator"], time.monotonic()
    watched.lags.clear()
    control.ask()
    first, start_cpu_s = len(shipped), cpu_s([pid])
    await asyncio.sleep(seconds)
    beside, passed_s = control.ask(), time.monotonic() - start_s
    cores = (cpu_s([pid]) - start_cpu_s) / passed_s
    settled = (len(shipped) - first) * BATCH / passed_s
    publishing.cancel()
    listening.cancel()
    lags = {**watched.lags, "control": beside}
    return {
        "lag": {name: lag_figures(lag) for name, lag in lags.items()},
        "settled a second": settled, "orchestrator cores": cores,
    }  # fmt: skip


async def measure(
    work: Crowd, url: str, folder: Path, control: Started, args: Namespace
) -> dict:
    watched = Watched()
    async with plane(work, url, folder, 1_000_000, watched.on_stats) as up:
        return await watch(up, watched, control, args.seconds)


def main() -> None:
    args = arguments(
        __doc__, rollouts=(2000, "rollouts in flight"), seconds=(20.0, "how long to watch")
    )
    if args.full:
        args.seconds = max(60.0, args.seconds)
    work = Crowd(args.rollouts)
    with (
        started(serve, work.engine) as engine,
        started(tick) as control,
        TemporaryDirectory(prefix="rollway-bench-") as folder,
    ):
        write_tokenizer(Path(folder))
        url = f"http://127.0.0.1:{engine.pipe.recv()}"
        figures = asyncio.run(measure(work, url, Path(folder), control, args))
    table(figures["lag"], COLUMNS)
    ours, bare = figures["lag"]["orchestrator"], figures["lag"]["control"]
    print(
        f"{args.rollouts} in flight, {figures['settled a second']:.0f} settle and train a second; the "
        f"orchestrator uses {figures['orchestrator cores']:.2f} cores"
    )
    print(f"orchestrator p99 over the control's, ms: {ours['p99 ms'] - bare['p99 ms']:.3g}")
    print(f"orchestrator max over the control's, ms: {ours['max ms'] - bare['max ms']:.3g}")
    bars = Bars(args)
    for name in ("orchestrator", "router", "worker"):
        for key, bar in (("p99 ms", P99_BAR_MS), ("max ms", MAX_BAR_MS)):
            over = figures["lag"][name][key] - bare[key]
            bars.at_most(f"{name} {key} over the control's", over, bar)
    finish("inflight", figures, args.json)
    bars.check()


if __name__ == "__main__":
    main()
