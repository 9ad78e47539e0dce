"""A run that is killed again and again, beside one that is left alone.

    python bench/kill.py [--full] [--steps 6] [--kills 2] [--seed 0]

Trains the demo twice: undisturbed, and with random `kill -9` of the orchestrator, the trainer, the
router, a worker or the whole run, each followed by `--resume` where the run ended. --full is 30 steps
and 20 kills of the demo's model; without it the model has learned next to nothing before. Every step
must be trained and reported once, and no rollout trained twice; rewards of the last steps are printed
side by side. Exits with 1 if anything of that does not hold.
"""

import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import Any

import psutil
from loopback.report import arguments, finish

FULL = {"steps": 30, "kills": 20}
EXAMPLE = Path(__file__).parents[1] / "examples" / "reverse-text" / "run.toml"
VICTIMS = ("orchestrator", "trainer", "trainer-rank", ".router", ".w0", ".w1", "launcher")
LAST = 5


class Trained:
    """A run directory, and the command that trains in it."""

    def __init__(self, folder: Path, name: str, args: Namespace) -> None:
        quick = ["--set", "warmup.solve_rate=0", "--set", "filters.zero_advantage=monitor"]
        warmup = [] if args.full else quick
        self._command = [
            sys.executable, "-m", "rollway", "train", str(EXAMPLE),
            "--set", f"name={name}", "--set", f"max_steps={args.steps}", *warmup,
            "--set", f"model.path={folder}/model", "--set", f"output_dir={folder}",
        ]  # fmt: skip
        self.path = folder / name
        self._log = folder / f"{name}.log"

    def start(self) -> "subprocess.Popen[bytes]":
        resume = ["--resume"] if (self.path / "config.toml").exists() else []
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command + resume, stdout=log, stderr=log)

    @property
    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    @property
    def reported(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.path / "metrics.jsonl").read_text().splitlines()
        ]

    def num_steps(self) -> int:
        with suppress(OSError):
            return len((self.path / "metrics.jsonl").read_bytes().splitlines())
        return 0


def kill_one(launcher: psutil.Process, chance: random.Random) -> str:
    """Kill a random process of the run; its name, or nothing if it was gone."""
    kind = chance.choice(VICTIMS)
    with suppress(psutil.Error):
        for process in [launcher, *launcher.children(recursive=True)]:
            name = "launcher" if process == launcher else process.cmdline()[3]
            if name == kind or (kind.startswith(".") and name.endswith(kind)):
                process.send_signal(signal.SIGKILL)
                return kind
    return ""


def train_under_fire(run: Trained, args: Namespace) -> Counter[str]:
    """Until it is trained; who was killed, and how often the run had to be resumed."""
    chance, told = random.Random(args.seed), Counter[str]()
    while True:
        process = run.start()
        before = run.num_steps()
        while process.poll() is None:
            time.sleep(chance.uniform(0.5, 4))
            is_up = run.num_steps() > before or chance.random() < 0.2
            if not is_up or told.total() - told["resumed"] >= args.kills:
                continue
            if victim := kill_one(psutil.Process(process.pid), chance):
                told[victim] += 1
                print(f"killed {victim} after step {run.num_steps()}", flush=True)
        if process.returncode == 0:
            return told
        told["resumed"] += 1
        if told["resumed"] > args.kills + 2:
            raise SystemExit(f"the run does not come back:\n{run.tail}")


def check(run: Trained, steps: int) -> dict[str, Any]:
    """What the ledger and the manifests say; AssertionError says what is wrong."""
    with closing(sqlite3.connect(run.path / "run.db")) as db:
        published = db.execute(
            "SELECT count(*) FROM steps WHERE published_s IS NOT NULL"
        ).fetchone()[0]
        settled = db.execute("SELECT max(num_settled) FROM rollouts").fetchone()[0]
        by_step = dict(
            db.execute(
                "SELECT step, count(*) FROM rollouts WHERE step NOT NULL GROUP BY step"
            )
        )
    manifests = [
        json.loads((run.path / f"batches/step_{n + 1}/manifest.json").read_text())
        for n in range(steps)
    ]
    ids = [{row["rollout_id"] for row in manifest["rows"]} for manifest in manifests]
    trained = [rollout_id for step in ids for rollout_id in step]
    reported = [line["step"] for line in run.reported]
    rewards = [line["reward/all/mean"] for line in run.reported if "reward/all/mean" in line]
    assert published == steps, f"{published} of {steps} steps are published"
    assert reported == list(range(1, steps + 1)), f"steps {reported} are reported"
    assert settled == 1, f"a rollout settled {settled} times"
    assert len(trained) == len(set(trained)), "a rollout trained twice"
    assert by_step == {n + 1: len(step) for n, step in enumerate(ids)}, (
        "ledger and manifests differ"
    )
    return {"steps": steps, "rollouts": len(trained), "reward": fmean(rewards[-LAST:])}


def main() -> None:
    args = arguments(
        __doc__,
        steps=(6, "steps to train"),
        kills=(2, "processes to kill"),
        seed=(0, "of the kills"),
    )
    if args.full:
        args = Namespace(**{**vars(args), **FULL})
    folder = Path(mkdtemp(prefix="rollway-kill-"))
    try:
        calm, killed = Trained(folder, "calm", args), Trained(folder, "killed", args)
        if calm.start().wait() != 0:
            raise SystemExit(f"the undisturbed run failed:\n{calm.tail}")
        told = train_under_fire(killed, args)
        figures = {"calm": check(calm, args.steps), "killed": check(killed, args.steps)}
    finally:
        shutil.rmtree(folder)
    for name, figure in figures.items():
        print(f"{name:8} {figure['steps']} steps, {figure['rollouts']} rollouts, each once, "
              f"reward of the last {LAST} steps {figure['reward']:.3f}")  # fmt: skip
    print(f"killed: {', '.join(f'{what} {number}' for what, number in told.most_common())}")
    finish("kill", {**figures, "killed processes": dict(told)}, args.json)


if __name__ == "__main__":
    main()
