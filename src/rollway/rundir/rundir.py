"""Paths of a run, and how a directory becomes one."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from ..config.sections import RunConfig
from ..errors import RunDirError
from ..records.ids import PolicyVersion, Step
from .metrics_file import MetricsFile

STABLE = "STABLE"
"""Marks a weights folder as complete; holds the record of the version."""


class RunDir:
    """`outputs/<run>`: configuration, ledger, metrics, logs, payload, batches, rollouts, weights."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()
        self.config = self.path / "config.toml"
        self.ledger = self.path / "run.db"
        self.metrics = self.path / "metrics.jsonl"
        self.evals = self.path / "evals.jsonl"
        self.now = self.path / "now.json"
        self.sinks = self.path / "sinks.json"
        self.logs = self.path / "logs"
        self.payload = self.path / "payload"
        self.landing = self.path / "landing"
        self.batches = self.path / "batches"
        self.rollouts = self.path / "rollouts"
        self.weights = self.path / "weights"
        self.checkpoints = self.path / "checkpoints"
        self.optimizer = self.path / "optimizer"
        self.keys = self.path / "keys"

    @property
    def exists(self) -> bool:
        return self.config.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out of this run."""
        if self.path.exists() and not self.exists and any(self.path.iterdir()):
            raise RunDirError(f"{self.path} exists and is not a run directory; choose another name")
        self.logs.mkdir(parents=True, exist_ok=True)
        with only_one(self.logs, f"trains in {self.path}"):
            yield

    def create(self, config: RunConfig) -> None:
        """Make the folders, and write down what the run was started with."""
        self.make_folders()
        self.keys.mkdir(mode=0o700, exist_ok=True)
        write_whole(self.config, tomli_w.dumps(without_none(msgspec.to_builtins(config))).encode())

    def make_folders(self) -> None:
        for folder in (
            self.logs, self.payload, self.batches, self.rollouts, self.weights, self.checkpoints,
            self.optimizer,
        ):  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Remove the run; only ever a directory that is one, and that nobody trains in."""
        if self.exists:
            with self.locked():
                shutil.rmtree(self.path)

    def manifest(self, step: Step) -> Path:
        return self.batches / f"step_{step}" / "manifest.json"

    def weights_of(self, version: PolicyVersion) -> Path:
        return self.weights / f"step_{version}"

    def optimizer_of(self, version: PolicyVersion) -> Path:
        """The optimizer as it was when it made this version."""
        return self.optimizer / f"step_{version}.pt"

    def prune_optimizer(self, newest: int) -> None:
        """Remove the states of versions up to `newest`."""
        for path in self.optimizer.glob("step_*.pt"):
            number = path.stem.removeprefix("step_")
            if number.isdigit() and int(number) <= newest:
                path.unlink()

    def checkpoint(self, step: Step) -> Path:
        return self.checkpoints / f"step_{step}"

    def saved_rollouts(self, step: Step) -> Path:
        return self.rollouts / f"step_{step}" / "train.jsonl"

    def saved_evals(self, version: PolicyVersion) -> Path:
        return self.rollouts / f"step_{version}" / "eval.jsonl"

    def last_checkpoint(self) -> Step | None:
        """The newest complete checkpoint; half-written ones have another name."""
        steps = [step for step, _ in _steps(self.checkpoints)]
        return Step(max(steps)) if steps else None

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all but the newest `keep`."""
        for _, folder in sorted(_steps(self.checkpoints))[:-keep]:
            shutil.rmtree(folder)

    def prune_weights(self, newest: int) -> None:
        """Remove versions up to `newest`."""
        for version, folder in _steps(self.weights):
            if version <= newest:
                shutil.rmtree(folder)

    def last_published(self) -> PolicyVersion:
        """The newest version whose weights are complete; 0 before the first."""
        whole = [number for number, folder in _steps(self.weights) if (folder / STABLE).exists()]
        return PolicyVersion(max(whole, default=0))

    def forget_batch(self, step: Step) -> None:
        for folder in (self.batches, self.rollouts):
            shutil.rmtree(folder / f"step_{step}", ignore_errors=True)

    def forget_evals(self, last: int) -> None:
        """Remove what was told of evaluations after that of version `last`: they are made anew."""
        for version, folder in _steps(self.rollouts):
            if version > last:
                (folder / "eval.jsonl").unlink(missing_ok=True)
        if self.evals.exists():
            write_whole(self.evals, MetricsFile(self.evals).kept_until(last))

    def next_generation(self) -> int:
        """How often the run was resumed, this time included: the segments there are tell."""
        starts = [one.name.partition(".")[0] for one in self.payload.glob("r*.seg")]
        seen = [int(one[1:]) for one in starts if one[1:].isdigit()]
        return max(seen, default=0) + 1

    def forget_unpublished(self, step: Step) -> None:
        """Remove weights that were not finished after `step`, checkpoints later than it, and lines of
        metrics for steps that will be trained once more."""
        for folder in (self.weights, self.checkpoints):
            for number, one in _steps(folder):
                if number > step:
                    shutil.rmtree(one)
        if self.metrics.exists():
            write_whole(self.metrics, MetricsFile(self.metrics).kept_until(step))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """The folders `step_N` in a folder, by N; others are the user's."""
    found = [(one.name.removeprefix("step_"), one) for one in folder.glob("step_*")]
    return [(int(number), one) for number, one in found if number.isdigit()]


def without_none(tree: Any) -> Any:
    """TOML has no null."""
    if isinstance(tree, dict):
        return {key: without_none(value) for key, value in tree.items() if value is not None}
    if isinstance(tree, (list, tuple)):
        return [without_none(value) for value in tree]
    return tree


@contextmanager
def only_one(folder: Path, does: str) -> Iterator[None]:
    """Keeps others out; the kernel lets go when this process ends. `does` is what the other one does."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(f"another process {does}") from None
        yield
    finally:
        os.close(held)
