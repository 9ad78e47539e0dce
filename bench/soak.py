"""Full load for a long time: is the memory of every process flat, are its open files, is all released?

    python bench/soak.py [--full] [--minutes 0.6] [--rollouts 64] [--turns 10] [--tokens 9000]

The real env server and orchestrator run step after step (see bench/step.py) until the time is up. After
every step memory and open files of each process are noted. Compared are the middle of the first third,
when everything has been used once, and the middle of the last. --full is ten minutes.
"""

import asyncio
import shutil
import statistics
import time
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from tempfile import mkdtemp

from loopback.engine import serve
from loopback.processes import Started, open_files, rss_bytes, started
from loopback.report import arguments, finish, table
from step import Workload, plane

from rollway.loop.processes.part import Part
from rollway.model.tiny import write_tokenizer
from rollway.payload.reuse import SPARES
from rollway.rundir.rundir import RunDir

MAX_STEPS = 100_000
COLUMNS = ("MB early", "MB late", "growth", "files early", "files late")


class Samples:
    """What the processes held, step by step."""

    def __init__(self, pids: dict[str, int], run: RunDir) -> None:
        self._pids = pids
        self._run = run
        self._rss: dict[str, list[float]] = defaultdict(list)
        self._files: dict[str, list[float]] = defaultdict(list)
        self.segments: list[float] = []
        self.spares: list[float] = []

    def take(self) -> None:
        for name, pid in self._pids.items():
            self._rss[name].append(rss_bytes(pid) / 1e6)
            self._files[name].append(open_files(pid))
        self.segments.append(len(list(self._run.payload.glob("*.seg"))))
        self.spares.append(len(list((self._run.payload / SPARES).glob("*"))))

    def rows(self) -> dict[str, dict[str, float]]:
        rows = {}
        for name in self._pids:
            early, late = _thirds(self._rss[name])
            files_early, files_late = _thirds(self._files[name])
            rows[name] = {
                "MB early": early, "MB late": late, "growth": late / early,
                "files early": files_early, "files late": files_late,
            }  # fmt: skip
        return rows


def _thirds(values: list[float]) -> tuple[float, float]:
    """Medians of the first third and of the last."""
    third = max(1, len(values) // 3)
    return statistics.median(values[:third]), statistics.median(values[-third:])


async def drive(
    trainer: Started, samples: Samples, orchestrator: Part, until_s: float
) -> int:
    """Let the trainer publish step after step; the number of steps."""
    steps = 0
    listening = asyncio.ensure_future(
        orchestrator.listen(lambda stats: None, lambda body: None)
    )
    while time.monotonic() < until_s and not listening.done():
        await asyncio.to_thread(trainer.pipe.recv)
        samples.take()
        steps += 1
        if time.monotonic() < until_s:
            trainer.pipe.send("publish")
    listening.cancel()
    return steps


async def soak(work: Workload, url: str, folder: Path, minutes: float) -> dict[str, object]:
    async with plane(work, url, folder, MAX_STEPS, lambda stats: None) as up:
        samples = Samples(up.pids, up.run)
        steps = await drive(
            up.trainer, samples, up.orchestrator, time.monotonic() + minutes * 60
        )
    return {
        "steps": steps, "processes": samples.rows(),
        "segments": _thirds(samples.segments), "spares": _thirds(samples.spares),
    }  # fmt: skip


def main() -> None:
    args = arguments(
        __doc__, minutes=(0.6, "how long"), rollouts=(64, "rollouts of a step"),
        turns=(10, "turns of a rollout"), tokens=(9000, "tokens of a rollout"),
        bytes=(384, "bytes of routes a token"),
    )  # fmt: skip
    if args.full:
        args = Namespace(**{**vars(args), "minutes": max(10.0, args.minutes)})
    work = Workload(args)
    folder = Path(mkdtemp(prefix="rollway-bench-"))
    try:
        write_tokenizer(folder)
        with started(serve, work.engine) as engine:
            url = f"http://127.0.0.1:{engine.pipe.recv()}"
            figures = asyncio.run(soak(work, url, folder, args.minutes))
    finally:
        shutil.rmtree(folder)
    steps, rows = figures["steps"], figures["processes"]
    print(
        f"{steps} steps of {args.rollouts} rollouts in {args.minutes:g} minutes, "
        f"{steps * work.reply_gb:.0f} GB of replies"
    )
    table(rows, COLUMNS)
    for name, what in (
        ("segments", "segments with refs"),
        ("spares", "files that wait for the next"),
    ):
        early, late = figures[name]
        print(
            f"{what}: early {early:g}, late {late:g} ({steps * args.rollouts} rollouts were written)"
        )
    finish("soak", figures, args.json)


if __name__ == "__main__":
    main()
