"""Rollouts whose code refuses to end: does each end all the same, and alone, and is memory flat?

    python bench/refusing.py [--full] [--rollouts 64] [--many 2000] [--json FILE]

For each way to refuse (code that swallows its cancellation, waits in a `finally` or in `__aexit__`,
shields itself, in a tool, an update, a reward or a child), this many rollouts run in one worker, beside
a few healthy ones. All must have ended 10 s after their deadlines, the refused ones with file and line,
the healthy ones scored. Then `--many` of them run, one crowd after the other, and the memory of the
server must stay flat. --full is 256 of each, and 10,000.
"""

import asyncio
import sys
import time
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loopback.engine import EngineSpec, serve
from loopback.model import write_model
from loopback.processes import children, rss_bytes, started
from loopback.report import Bars, arguments, finish, table
from loopback.server import Server, env_server

import rollway as rw
from rollway.config.sections import EnvConfig, ServerConfig
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Failed, Scored, Settled
from rollway.records.turn import Sampling
from rollway.wire.messages import Run

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.doubles import refusing

FULL = {"rollouts": 256, "many": 10_000}
DEADLINE_S, GRACE_S = 5.0, 5.0
SLOW_S = 10.0
"""How much later than its deadline and the grace of code that refuses a rollout may end."""
NUM_GOOD = 16
GOOD_TASK = 20
CROWD = 500
MOST_GROWN_MB = 50.0
ENGINE = EngineSpec(layers=1, slots=8, drawn=4)


class Crowd:
    """Runs many rollouts at once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._number = 0

    async def run(self, tasks: list[int]) -> tuple[dict[int, list[Settled]], float]:
        """Run one rollout of each of these tasks. Return how they ended, by task, and the seconds that
        the last one took."""
        start_s, waiting = time.monotonic(), {}
        for task in tasks:
            self._number += 1
            name = RolloutId(f"r{self._number}")
            waiting[name] = task
            whole = rw.Task(id=str(task), prompt=f"{task}?", answer="1")
            await self._server.client.send(
                Run(name, 1, whole, Sampling(4), PolicyVersion(0), 0)
            )
        ends: dict[int, list[Settled]] = {}
        while waiting:
            message = await self._server.client.receive()
            if isinstance(message, Settled) and message.rollout_id in waiting:
                ends.setdefault(waiting.pop(message.rollout_id), []).append(message)
        return ends, time.monotonic() - start_s


def environment(concurrency: int) -> EnvConfig:
    server = ServerConfig(
        workers=1, concurrency=concurrency, rollout_deadline_s=DEADLINE_S, scoring_deadline_s=DEADLINE_S,
        tool_deadline_s=DEADLINE_S,
    )  # fmt: skip
    return EnvConfig(id=refusing.__file__, args={"kind": "Refusing"}, server=server)


async def every_kind(url: str, folder: Path, args: Namespace, bars: Bars) -> dict[str, Any]:
    rows = {}
    for number, kind in enumerate(refusing.KINDS):
        async with env_server(environment(args.rollouts + NUM_GOOD), url, folder) as server:
            tasks = [number] * args.rollouts + [GOOD_TASK] * NUM_GOOD
            ends, last_s = await Crowd(server).run(tasks)
        named = [end for end in ends[number] if is_named(end)]
        healthy = [end for end in ends[GOOD_TASK] if isinstance(end.outcome, Scored)]
        rows[kind] = {"last end s": last_s, "named": len(named), "healthy": len(healthy)}
        bars.at_most(
            f"{kind}: the last end, in s,", last_s, 2 * DEADLINE_S + GRACE_S + SLOW_S
        )
        bars.at_least(f"{kind}: healthy rollouts that are scored", len(healthy), NUM_GOOD)
        if kind != "background":  # its rollout has ended, and counts
            bars.at_least(f"{kind}: ends that name a line", len(named), args.rollouts)
    table(rows, ("last end s", "named", "healthy"))
    return rows


def is_named(end: Settled) -> bool:
    return (
        isinstance(end.outcome, Failed) and Path(refusing.__file__).name in end.outcome.where
    )


async def many(url: str, folder: Path, args: Namespace, bars: Bars) -> dict[str, float]:
    """Run crowd after crowd. Memory counts once the first has ended."""
    kinds = [number for number, kind in enumerate(refusing.KINDS) if kind != "background"]
    first_mb, most_mb = 0.0, 0.0
    async with env_server(environment(CROWD), url, folder) as server:
        crowd = Crowd(server)
        for number in range(args.many // CROWD):
            await crowd.run([kinds[n % len(kinds)] for n in range(CROWD)])
            workers = max(map(rss_bytes, children(server.pid)), default=0)
            now_mb = (rss_bytes(server.pid) + workers) / 1e6
            first_mb = first_mb if number else now_mb
            most_mb = max(most_mb, now_mb)
    print(
        f"\n{args.many:,} that refuse: {first_mb:.0f} MB after the first crowd, {most_mb:.0f} MB at most"
    )
    bars.at_most("what memory grew by, in MB,", most_mb - first_mb, MOST_GROWN_MB)
    return {"first MB": first_mb, "most MB": most_mb}


async def measure(url: str, folder: Path, args: Namespace, bars: Bars) -> dict[str, Any]:
    return {
        "kinds": await every_kind(url, folder, args, bars),
        "many": await many(url, folder, args, bars),
    }


def main() -> None:
    args = arguments(
        __doc__, rollouts=(64, "rollouts of each kind"), many=(2000, "rollouts in all crowds")
    )
    if args.full:
        args = Namespace(**{**vars(args), **FULL})
    bars = Bars(args)
    with (
        started(serve, ENGINE) as engine,
        TemporaryDirectory(prefix="rollway-bench-") as name,
    ):
        write_model(Path(name), ENGINE)
        url = f"http://127.0.0.1:{engine.pipe.recv()}"
        figures = asyncio.run(measure(url, Path(name), args, bars))
    finish("refusing", figures, args.json)
    bars.check()


if __name__ == "__main__":
    main()
