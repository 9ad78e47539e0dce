"""Workers that die again and again: does every rollout settle, exactly once, and is memory given back?

    python bench/chaos.py [--full] [--seconds 20] [--rollouts 256] [--turns 20] [--workers 4]

A real env server runs 256 rollouts of 20 turns at any time against a loopback engine. Every two seconds
a worker is killed by SIGKILL; one is stopped by SIGSTOP, again and again, until its lease runs out. When
the time is up the rest is left to finish. Then the router's memory is compared with what it was before,
after an equal crowd had run undisturbed. Ends with 1 if a rollout was lost, answered twice, or failed,
or if the router kept more than a few MB.
"""

import asyncio
import os
import random
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from loopback import talk
from loopback.engine import EngineSpec, serve
from loopback.processes import children, rss_bytes, started
from loopback.report import arguments, finish, table
from loopback.server import Server, env_server

import rollway as rw
from rollway.config.sections import EnvConfig, ServerConfig
from rollway.model.tiny import write_tokenizer
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Settled
from rollway.records.turn import Sampling
from rollway.wire.messages import Run, WorkerLost

KILL_EVERY_S = 2.0
LEASE_S = 4.0
MAX_KEPT_MB = 8.0
ENGINE = EngineSpec(layers=4, slots=4, drawn=16)
COLUMNS = ("rollouts", "settled", "twice", "lost", "failed", "moved", "attempts")


class Crowd:
    """Rollouts that are asked for, and what came back."""

    def __init__(self, server: Server, turns: int) -> None:
        self._client = server.client
        self._turns = turns
        self.asked: list[str] = []
        self.ends: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.errors: list[str] = []
        self.num_lost_workers = 0
        self.num_moved = 0
        self.most_attempts = 0

    @property
    def num_open(self) -> int:
        return len(self.asked) - len(self.ends)

    async def ask(self) -> None:
        id = f"r{len(self.asked)}"
        self.asked.append(id)
        task = rw.Task(id=id, prompt="go on", answer=str(self._turns))
        await self._client.send(
            Run(RolloutId(id), 1, task, Sampling(ENGINE.drawn), PolicyVersion(0), 0)
        )

    async def keep(self, at_a_time: int, until_s: float) -> None:
        """Keep this number of rollouts running, then wait until the last has ended."""
        for _ in range(at_a_time):
            await self.ask()
        while self.num_open:
            if await self._hear() and time.monotonic() < until_s:
                await self.ask()

    async def _hear(self) -> bool:
        """Whether the next message was an end."""
        match await self._client.receive():
            case Settled(rollout_id=id, attempt=attempt, outcome=outcome):
                self.ends[id] += 1
                self.kinds[type(outcome).__name__] += 1
                self.most_attempts = max(self.most_attempts, attempt)
                if type(outcome).__name__ == "Failed":
                    self.errors.append(f"{id}: {outcome.error}")
                return True
            case WorkerLost(num_moved=moved):
                self.num_lost_workers += 1
                self.num_moved += moved
        return False

    async def late(self, seconds: float) -> None:
        """Whatever still comes must not be an end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    await self._hear()

    def figures(self) -> dict[str, float]:
        return {
            "rollouts": len(self.asked),
            "settled": len(self.ends),
            "twice": sum(count > 1 for count in self.ends.values()),
            "lost": len(set(self.asked) - set(self.ends)),
            "failed": self.kinds["Failed"] + self.kinds["Cancelled"],
            "moved": self.num_moved,
            "attempts": self.most_attempts,
        }


async def murder(router_pid: int, until_s: float) -> Counter[str]:
    """Kill a worker every two seconds, and keep one stopped."""
    done: Counter[str] = Counter()
    stopped = 0
    rng = random.Random(0)
    while time.monotonic() < until_s:
        alive = children(router_pid)
        if stopped not in alive and len(alive) > 2:
            stopped = alive[0]
            done["stopped"] += _signal(stopped, signal.SIGSTOP)
        victims = [pid for pid in alive if pid != stopped]
        if victims:
            done["killed"] += _signal(rng.choice(victims), signal.SIGKILL)
        await asyncio.sleep(KILL_EVERY_S)
    return done


def _signal(pid: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


async def chaos(url: str, folder: Path, args: Namespace) -> dict[str, object]:
    env = EnvConfig(
        id=talk.__file__,
        args={"turns": args.turns},
        server=ServerConfig(
            workers=args.workers,
            lease_s=LEASE_S,
            concurrency=-(-args.rollouts // args.workers),
        ),
    )
    async with env_server(env, url, folder) as server:
        calm = Crowd(server, args.turns)
        await calm.keep(args.rollouts, 0.0)
        before_mb = rss_bytes(server.pid) / 1e6
        until_s = time.monotonic() + args.seconds
        wild = Crowd(server, args.turns)
        murdering = asyncio.ensure_future(murder(server.pid, until_s))
        await wild.keep(args.rollouts, until_s)
        done = await murdering
        await wild.late(LEASE_S)
        after_mb = rss_bytes(server.pid) / 1e6
    return {
        "undisturbed": calm.figures(),
        "under fire": wild.figures(),
        "workers lost": wild.num_lost_workers,
        "late": (folder / "router.log").read_text().count("dropped late end"),
        "router MB before": before_mb,
        "router MB after": after_mb,
        "errors": wild.errors[:5],
        **done,
    }


def violations(figures: dict[str, object]) -> list[str]:
    found = []
    for name in ("undisturbed", "under fire"):
        row = figures[name]
        assert isinstance(row, dict)
        found += [
            f"{name}: {row[key]} {key}" for key in ("twice", "lost", "failed") if row[key]
        ]
    kept = float(str(figures["router MB after"])) - float(str(figures["router MB before"]))
    if kept > MAX_KEPT_MB:
        found.append(f"the router kept {kept:.1f} MB")
    return found


def main() -> None:
    args = arguments(
        __doc__, seconds=(20.0, "how long workers die"), rollouts=(256, "rollouts at a time"),
        turns=(20, "turns of a rollout"), workers=(4, "workers"),
    )  # fmt: skip
    if args.full:
        args.seconds = max(args.seconds, 60.0)
    folder = Path(mkdtemp(prefix="rollway-bench-"))
    try:
        write_tokenizer(folder)
        with started(serve, ENGINE) as engine:
            url = f"http://127.0.0.1:{engine.pipe.recv()}"
            figures = asyncio.run(chaos(url, folder, args))
    finally:
        shutil.rmtree(folder)
    table({name: figures[name] for name in ("undisturbed", "under fire")}, COLUMNS)  # type: ignore[misc]
    print(
        f"workers killed {figures.get('killed', 0)}, stopped {figures.get('stopped', 0)}; "
        f"{figures['late']} answers came late and were dropped; router "
        f"{figures['router MB before']:.1f} MB before, {figures['router MB after']:.1f} MB after"
    )
    found = violations(figures)
    finish("chaos", {**figures, "violations": found}, args.json)
    if found:
        sys.exit("violated: " + "; ".join(found))


if __name__ == "__main__":
    main()
