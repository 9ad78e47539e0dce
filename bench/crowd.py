"""Ten thousand rollouts at once on two workers: do all end, and how late does the router run?

    python bench/crowd.py [--full] [--rollouts 10000] [--waves 1]

Every rollout sleeps for 100 ms and asks a loopback engine once. All are sent at once; each worker has
credits for half of them. Beside the server ticks a control, a process with nothing on its loop, so that
the router's lag can be told from the machine's noise. --full sends three waves.
"""

import asyncio
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from loopback import nap
from loopback.control import tick
from loopback.engine import EngineSpec, serve
from loopback.processes import Started, cpu_s, rss_bytes, started
from loopback.report import arguments, finish, lag_figures, table
from loopback.server import Server, env_server

import rollway as rw
from rollway.config.sections import EnvConfig, ServerConfig
from rollway.loop.watch.lag import merge
from rollway.model.tiny import write_tokenizer
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.lag import LagStats
from rollway.records.rollout import Scored, Settled
from rollway.records.turn import Sampling
from rollway.wire.messages import Run, ServerStats

ENGINE = EngineSpec(layers=4, slots=4, drawn=8, latency_s=0.005)
WORKERS = 2
COLUMNS = ("p50 ms", "p99 ms", "max ms", "blocked s")


class Wave:
    """Rollouts that were all sent before the first end was read."""

    def __init__(self, server: Server) -> None:
        self._client = server.client
        self.ends: Counter[str] = Counter()
        self.num_scored = 0
        self.error = ""
        self.lag = {"router": LagStats(), "worker": LagStats()}

    async def run(self, count: int, number: int) -> None:
        for n in range(count):
            task = rw.Task(id=str(n), prompt="go on")
            id = RolloutId(f"w{number}.{n}")
            await self._client.send(
                Run(id, 1, task, Sampling(ENGINE.drawn), PolicyVersion(0), 0)
            )
        while len(self.ends) < count:
            self._on(await self._client.receive())
        tail_s = time.monotonic() + 1.5  # statistics come once a second
        while time.monotonic() < tail_s:
            self._on(await self._client.receive())

    def _on(self, message: object) -> None:
        match message:
            case Settled(rollout_id=id, outcome=outcome):
                self.ends[id] += 1
                self.num_scored += isinstance(outcome, Scored)
                if not isinstance(outcome, Scored):
                    self.error = self.error or str(outcome)
            case ServerStats(stats=stats):
                kind = "worker" if ".w" in stats.process else "router"
                self.lag[kind] = merge(self.lag[kind], stats.lag)


async def crowd(
    url: str, folder: Path, control: Started, args: Namespace
) -> dict[str, object]:
    env = EnvConfig(
        id=nap.__file__,
        args={"seconds": 0.1},
        server=ServerConfig(workers=WORKERS, concurrency=-(-args.rollouts // WORKERS)),
    )
    rows: dict[str, dict[str, float]] = {}
    seconds, cpu = [], []
    async with env_server(env, url, folder) as server:
        for number in range(args.waves):
            wave = Wave(server)
            control.ask()
            start_s, start_cpu_s = time.monotonic(), cpu_s([server.pid])
            await wave.run(args.rollouts, number)
            seconds.append(time.monotonic() - start_s - 1.5)
            cpu.append(cpu_s([server.pid]) - start_cpu_s)
            beside = control.ask()
            for name, lag in (*wave.lag.items(), ("control", beside)):
                rows[f"wave {number + 1}: {name}"] = lag_figures(lag)
            if wave.num_scored < args.rollouts or max(wave.ends.values()) > 1:
                sys.exit(
                    f"{wave.num_scored} of {args.rollouts} were scored, each once; {wave.error}"
                )
        rss_mb = rss_bytes(server.pid) / 1e6
    return {"lag": rows, "seconds": seconds, "router CPU s": cpu, "router MB": rss_mb}


def main() -> None:
    args = arguments(
        __doc__,
        rollouts=(10_000, "rollouts at a time"),
        waves=(1, "how often, one after the other"),
    )
    if args.full:
        args.waves = max(args.waves, 3)
    with (
        started(serve, ENGINE) as engine,
        started(tick) as control,
        TemporaryDirectory(prefix="rollway-bench-") as folder,
    ):
        write_tokenizer(Path(folder))
        url = f"http://127.0.0.1:{engine.pipe.recv()}"
        figures = asyncio.run(crowd(url, Path(folder), control, args))
    table(figures["lag"], COLUMNS)  # type: ignore[arg-type]
    spent = ", ".join(f"{seconds:.1f} s" for seconds in figures["seconds"])  # type: ignore[attr-defined]
    per_ms = [1000 * cpu_s / args.rollouts for cpu_s in figures["router CPU s"]]  # type: ignore[attr-defined]
    print(
        f"all {args.rollouts} scored in {spent}; the router took {max(per_ms):.2f} ms of CPU for each"
    )
    finish("crowd", figures, args.json)


if __name__ == "__main__":
    main()
