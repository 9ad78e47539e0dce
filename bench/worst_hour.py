"""A run that is killed, stopped, filled up and stalled, and user code that forks, prints, leaks, raises.

    python bench/worst_hour.py [--full] [--rounds 8] [--seed 0] [--json FILE]

Every round does one thing to a run with two engines: kills one of its processes, stops one for a while,
fills the disk, or lets one engine stop in the middle of a reply. A run that ended is resumed. Engines
and trainer are stand-ins without a model. In the end every rollout must have settled once and every step
be trained once, no process may be left, no process of ours may have grown, and only those rollouts may
have failed whose own code raises or exits, or for which a full disk had no room. While an engine stalls,
the run keeps a quarter of its pace. Only root fills a disk. Exits with 1 if anything of that does not
hold. --full is 30 rounds.
"""

import asyncio
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import psutil
from aiohttp import web
from loopback.report import arguments, finish

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import build_tiny_moe
from tests.doubles.stand_ins import Background, CopyingTrainer, DrawingEngine, background
from tests.doubles.workspace import WAITS_FOR_TRAINER, Workspace

from rollway.inference.rendering.tokenizer import Tokenizer

ROWDY = Path(__file__).with_name("loopback") / "rowdy.py"
FULL_ROUNDS = 30
KILLED = ("orchestrator", "router", ".w0", ".w1", ".score0", "launcher")
STOPPED = ("orchestrator", "router", ".w0", ".w1", ".score0")
LATENCY_S = 0.1
LEAST_PACE = 0.25
INNOCENT = (
    "outcome = 'failed' AND task_id % 23 != 0 AND task_id % 31 != 0 AND task_id % 301 != 0 "
    "AND error NOT LIKE '%No space left on device%'"
)
"""Rollouts that failed although their own code, in loopback/rowdy.py, neither raises nor exits, and the
disk had room for what they brought."""
PACE_S, STALL_S = 5.0, 25.0
MAX_GROWTH_MB, MAX_NEW_FILES = 40.0, 25
OURS = ("orchestrator", "router", "launcher")
"""Processes without user code: these may not grow."""
FIRST_LOOK_S = 5.0
"""A process grows while it starts. It is compared with what it was at this age."""


class StallingEngine(DrawingEngine):
    """Stops in the middle of its replies while it `is_stalled`."""

    is_stalled = False

    async def _complete(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        whole = await super()._complete(request)
        assert isinstance(whole.body, bytes)
        body, half = whole.body, len(whole.body) // 2
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        reply.content_length = len(body)
        await reply.prepare(request)
        await reply.write(body[:half])
        await asyncio.sleep(LATENCY_S)
        while self.is_stalled:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        with suppress(ConnectionError):  # the client has given it up
            await reply.write(body[half:])
        return reply


class Growth:
    """Memory and files of our own processes: when each was young, and the most since."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], tuple[float, int]] = {}
        self._most: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def look(self, processes: dict[str, list[psutil.Process]]) -> None:
        for name in OURS:
            for process in processes.get(name, ()):
                with suppress(psutil.Error):
                    if time.time() - process.create_time() < FIRST_LOOK_S:
                        continue
                    now = process.memory_info().rss / 1e6, process.num_fds()
                    first = self._first.setdefault((name, process.pid), now)
                    most = self._most[name]
                    most[0] = max(most[0], now[0] - first[0])
                    most[1] = max(most[1], now[1] - first[1])

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            name: {"grew MB": round(most[0], 1), "new files": most[1]}
            for name, most in self._most.items()
        }


class Ordeal:
    """A run, and what can be done to it."""

    def __init__(
        self,
        work: Workspace,
        engines: list[StallingEngine],
        args: Namespace,
        disk: Path | None,
    ) -> None:
        self._work = work
        self._engines = engines
        self._chance = random.Random(args.seed)
        self._disk = disk
        self._process: subprocess.Popen[str] | None = None
        self.growth = Growth()
        self.told: Counter[str] = Counter()
        self.paces: list[float] = []
        """Steps a second while an engine stalled, as a share of those just before."""

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the processes of the run by what they do."""
        found = defaultdict(list)
        for process in self._work.processes():
            with suppress(psutil.Error, IndexError):
                words = process.cmdline()
                if "train" in words:
                    found["launcher"].append(process)
                elif "rollway.loop.processes.child" in words:
                    name = words[words.index("rollway.loop.processes.child") + 1]
                    found[re.sub(r"^rowdy\.?(?=router)|^rowdy(?=\.)", "", name)].append(
                        process
                    )
        return found

    def ensure_running(self, *options: str) -> subprocess.Popen[str]:
        """Return the run's process. A run that has ended is resumed, and trains a step first."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        resume = ["--resume"] if (self._work.run / "config.toml").exists() else []
        if self._process is not None:
            self.told["resumed"] += 1
        log = self._work.folder / "console.log"
        with log.open("w") as out:
            self._process = subprocess.Popen(
                self._work.command(*resume, *options), cwd=self._work.folder, env=self._work.env,
                stdout=out, stderr=out, text=True,
            )  # fmt: skip
        while not (found := re.search(WAITS_FOR_TRAINER, log.read_text())):
            self._must_run(log)
            time.sleep(0.05)
        assert self._work.trainer is not None
        self._work.trainer.begin(str(self._work.folder / found[1]))
        return self._process

    def _must_run(self, log: Path) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise SystemExit(f"the run does not come back:\n{log.read_text()[-2000:]}")

    @property
    def num_steps(self) -> int:
        with suppress(OSError):
            return len((self._work.run / "metrics.jsonl").read_bytes().splitlines())
        return 0

    def wait_for_steps(self, count: int) -> None:
        """Let the run train some steps more; resume it if it ends meanwhile."""
        wanted = self.num_steps + count
        give_up_s = time.monotonic() + 120.0
        while self.num_steps < wanted:
            self.ensure_running("--set", "max_steps=100000")
            self.growth.look(self.processes())
            if time.monotonic() > give_up_s:
                raise SystemExit(f"no step in 120 s after {dict(self.told)}: it hangs")
            time.sleep(0.1)

    def one_round(self) -> None:
        faults: list[Callable[[], str]] = [self._kill, self._kill, self._stop, self._stall]
        if self._disk is not None:
            faults.append(self._fill)
        what = self._chance.choice(faults)()
        if what:
            self.told[what] += 1
            print(
                f"round {self.told.total()}: {what} after step {self.num_steps}", flush=True
            )

    def _pick(self, kinds: tuple[str, ...]) -> tuple[str, psutil.Process | None]:
        kind, found = self._chance.choice(kinds), self.processes()
        chosen = [
            process
            for name, processes in found.items()
            if name == kind or (kind.startswith(".") and name.endswith(kind))
            for process in processes
        ]
        return kind, chosen[0] if chosen else None

    def _kill(self) -> str:
        kind, process = self._pick(KILLED)
        if process is None:
            return ""
        with suppress(psutil.Error):
            process.kill()
        if kind in OURS and self._process is not None:
            self._process.wait(60)
        return f"killed {kind}"

    def _stop(self) -> str:
        kind, process = self._pick(STOPPED)
        if process is None:
            return ""
        with suppress(psutil.Error):
            process.suspend()
            time.sleep(self._chance.uniform(1, 6))
            process.resume()
        return f"stopped {kind}"

    def _stall(self) -> str:
        engine, usual = self._chance.choice(self._engines), self._steps_a_second(PACE_S)
        engine.is_stalled = True
        pace = self._steps_a_second(STALL_S)
        engine.is_stalled = False
        self.paces.append(pace / usual)
        return "stalled an engine"

    def _steps_a_second(self, seconds: float) -> float:
        before = self.num_steps
        time.sleep(seconds)
        return (self.num_steps - before) / seconds

    def _fill(self) -> str:
        assert self._disk is not None
        filler = self._disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(self._chance.uniform(1, 4))
        filler.unlink()
        return "filled the disk"

    def end(self) -> None:
        """Train three steps more and end the run."""
        process = self.ensure_running("--set", "max_steps=100000")
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process = self.ensure_running("--set", f"max_steps={self.num_steps + 3}")
        if process.wait(120):
            raise SystemExit((self._work.folder / "console.log").read_text()[-2000:])
        time.sleep(1.0)

    def check(self) -> dict[str, object]:
        """Return what the ledger says. An AssertionError says what is wrong."""
        left = [process.cmdline() for process in self._work.processes()]
        assert not left, f"these processes are left: {left}"
        steps = [line["step"] for line in self._work.metrics()]
        assert steps == list(range(1, len(steps) + 1)), f"steps {steps} are reported"
        with closing(sqlite3.connect(self._work.run / "run.db")) as db:

            def ask(sql: str) -> list[tuple[object, ...]]:
                return db.execute(sql).fetchall()

            assert ask("SELECT max(num_settled) FROM rollouts") == [(1,)]
            published = ask("SELECT count(*) FROM steps WHERE published_s IS NOT NULL")
            assert published == [(len(steps),)], published
            ends = dict(ask("SELECT outcome, count(*) FROM rollouts GROUP BY outcome"))
            failed = ask(
                "SELECT boundary, count(*) FROM rollouts WHERE outcome = 'failed' GROUP BY boundary"
            )
            innocent = ask(f"SELECT rollout_id, error FROM rollouts WHERE {INNOCENT}")
            assert not innocent, f"{len(innocent)} rollouts failed for others: {innocent[:3]}"
        paces = [round(pace, 2) for pace in self.paces]
        assert all(pace >= LEAST_PACE for pace in paces), f"pace beside a stall: {paces}"
        return {"steps": len(steps), "ends": ends, "failed": dict(failed), "paces": paces}


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a disk of 300 MB, if this user may."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        print("not root: the disk is never full")
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def stalling_engines(model: Path, loop: Background) -> Iterator[list[StallingEngine]]:
    letters = Tokenizer(str(model)).encode("abcdefghijkl")
    engines = [StallingEngine(letters, loop) for _ in range(2)]
    for engine in engines:
        engine.open()
    try:
        yield engines
    finally:
        for engine in engines:
            engine.is_stalled = False
            engine.kill()


def run(folder: Path, args: Namespace) -> Ordeal:
    model, place = folder / "model", folder / "place"
    for new in (model, place, place / "outputs"):
        new.mkdir()
    build_tiny_moe(model)
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(place / "outputs"))
        loop = stack.enter_context(background())
        engines = stack.enter_context(stalling_engines(model, loop))
        trainer = CopyingTrainer(model, loop)
        work = Workspace(
            place, model, engines=[engine.url for engine in engines], trainer=trainer
        )
        stack.callback(work.kill)
        stack.callback(trainer.stop)
        text = re.sub(r'id = ".*envs.py"\n.*\n', f'id = "{ROWDY}"\n', work.file.read_text())
        work.file.write_text(text.replace("workers = 1", "workers = 2"))
        ordeal = Ordeal(work, engines, args, disk)
        while ordeal.told.total() - ordeal.told["resumed"] < args.rounds:
            ordeal.wait_for_steps(3)
            ordeal.one_round()
        ordeal.wait_for_steps(3)
        ordeal.end()
        trainer.stop()
        figures = ordeal.check()
    print(f"{figures['steps']} steps, each once; ends of rollouts: {figures['ends']}")
    print(f"failed, by their own code or a full disk: {figures['failed']}")
    print(f"pace while an engine stalled, as a share of the pace before: {figures['paces']}")
    print(f"done to it: {', '.join(f'{what} {n}' for what, n in ordeal.told.most_common())}")
    finish("worst_hour", {**figures, "done": dict(ordeal.told), "growth": ordeal.growth.figures()},
           args.json)  # fmt: skip
    return ordeal


def main() -> None:
    args = arguments(
        __doc__, rounds=(8, "things done to the run"), seed=(0, "of what is done")
    )
    if args.full:
        args.rounds = FULL_ROUNDS
    folder = Path(mkdtemp(prefix="rollway-worst-"))
    try:
        ordeal = run(folder, args)
    finally:
        shutil.rmtree(folder)
    for name, growth in ordeal.growth.figures().items():
        assert growth["grew MB"] <= MAX_GROWTH_MB, f"{name} grew: {growth}"
        assert growth["new files"] <= MAX_NEW_FILES, f"{name} holds files: {growth}"


if __name__ == "__main__":
    main()
