"""The paths of a run, and how its directory is made, locked, pruned and removed."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from ..config.credentials import hide_all_credentials
from ..config.sections import RunConfig
from ..errors import RunDirError
from ..records.ids import PolicyVersion, Step
from ..records.payload import SegmentName
from ..records.probe import PROBE_FILE
from .metrics_file import MetricsFile

STABLE = "STABLE"
"""The file that marks a weights folder as complete. It holds the record of the version."""
REMOVED = ".removed_"
"""A folder that is being removed has a name that starts with this."""


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
        self.trainer = self.path / "trainer"

    @property
    def exists(self) -> bool:
        return self.config.exists()

    def identify(self) -> tuple[int, int] | None:
        """Return what stays the same as long as nobody removes the directory; zeros if it is gone, and
        None if that cannot be seen now, as on a network file system without its server."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return 0, 0
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def removed(self) -> RunDirError:
        """Return the error of a run whose directory is no longer the one that it began in."""
        return RunDirError(f"{self.path} was removed or replaced while the run was using it")

    def check_ledger(self) -> None:
        if not self.ledger.exists():
            raise RunDirError(
                f"{self.ledger} was removed: --resume will not know what has been trained until now"
            )

    @property
    def has_begun(self) -> bool:
        """Whether there may be anything to continue: the orchestrator opens the ledger before it starts
        the first rollout. A run that ended before may be started again as if it were new."""
        return self.exists and (self.ledger.exists() or self.last_published() > 0)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out of this run while the block lasts."""
        if self.path.exists() and not self.exists and any(self.path.iterdir()):
            raise RunDirError(
                f"{self.path} exists and is not a run directory; choose another name"
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_folder(self.path, f"trains in {self.path}"):
            self.logs.mkdir(exist_ok=True)
            yield

    @property
    def is_locked(self) -> bool:
        """Whether a process trains in this run."""
        try:
            with lock_folder(self.path, "trains"):
                return False
        except RunDirError:
            return True
        except OSError:  # no such folder, or a file system without locks
            return False

    def create(self, config: RunConfig) -> None:
        """Make the folders, and write down the config that the run was started with."""
        self.make_folders()
        write_whole(self.config, tomli_w.dumps(shown_tree(config)).encode())

    def make_folders(self) -> None:
        for folder in (
            self.logs, self.payload, self.batches, self.rollouts, self.weights, self.checkpoints,
            self.trainer,
        ):  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Remove the run. A directory that is not a run, or that is being trained in, is left alone."""
        if self.exists:
            with self.lock():
                shutil.rmtree(self.path)

    def manifest(self, step: Step) -> Path:
        return self.batches / f"step_{step}" / "manifest.json"

    def weights_of(self, version: PolicyVersion) -> Path:
        return self.weights / f"step_{version}"

    def probe_of(self, version: PolicyVersion) -> Path:
        """Return the file by which engines that have loaded this version are checked. Version 0, which
        lies in the model's own folder, has its probe here as well."""
        return self.weights_of(version) / PROBE_FILE

    def state_of(self, version: PolicyVersion) -> Path:
        """Return the folder with the trainer's state right after the step that made this version."""
        return self.trainer / f"step_{version}"

    def order_of(self, step: Step) -> Path:
        """Return the file that says how the batch of this step was trained. It is kept as long as a
        restart of the trainer would train the batch again."""
        return self.trainer / f"batch_{step}.msgpack"

    def last_state(self, until: PolicyVersion) -> PolicyVersion | None:
        """Return the newest version up to `until` whose trainer state is complete."""
        versions = [number for number, _ in numbered(self.trainer) if number <= until]
        return PolicyVersion(max(versions)) if versions else None

    def set_aside(self, step: Step) -> Path:
        """Return the folder for rows of this step that the trainer could not train."""
        return self.path / "set_aside" / f"step_{step}"

    def checkpoint(self, step: Step) -> Path:
        return self.checkpoints / f"step_{step}"

    def saved_rollouts(self, step: Step) -> Path:
        return self.rollouts / f"step_{step}" / "train.jsonl"

    def saved_evals(self, version: PolicyVersion) -> Path:
        return self.rollouts / f"step_{version}" / "eval.jsonl"

    def last_published(self) -> PolicyVersion:
        """Return the newest version whose weights are complete; 0 before the first."""
        folders = numbered(self.weights)
        complete = [number for number, folder in folders if (folder / STABLE).exists()]
        return PolicyVersion(max(complete, default=0))

    def has_version(self, version: PolicyVersion) -> bool:
        """Whether the weights of a version are marked as complete. Version 0 is the model itself."""
        return not version or (self.weights_of(version) / STABLE).exists()

    def last_checkpoint(self) -> Step | None:
        """Return the step of the newest complete checkpoint. Half-written ones have another name."""
        return max((Step(step) for step, _ in numbered(self.checkpoints)), default=None)

    def next_generation(self) -> int:
        """Return a generation newer than that of every segment here, so that a resumed run writes to
        no file that exists already. Segments are named after the generation that wrote them."""
        names = [SegmentName.parse(path.name) for path in self.payload.glob("r*.seg")]
        return max((name.generation for name in names if name), default=0) + 1

    def prune_weights(self, current: int, keep: int) -> None:
        """Remove old weights: of the versions up to `current`, the newest `keep` stay."""
        for version, folder in numbered(self.weights):
            if version <= current - keep:
                remove_folder(folder)

    def prune_trainer(self, saved: PolicyVersion) -> None:
        """Remove what a trainer that restarts from version `saved` does not read."""
        for version, folder in numbered(self.trainer):
            if version < saved:
                remove_folder(folder)
        for path in self.trainer.glob("batch_*.msgpack"):
            step = path.stem.removeprefix("batch_")
            if step.isdigit() and int(step) <= saved:
                path.unlink(missing_ok=True)

    def begin_checkpoint(self, version: PolicyVersion) -> None:
        """Keep the weights of a version when they are pruned: link their files to a checkpoint, which
        gets its final name once the trainer's state is complete, too."""
        link_files(self.weights_of(version), partial_of(self.checkpoint(Step(version))))

    def finish_checkpoint(self, version: PolicyVersion) -> None:
        """Add the trainer's state to a checkpoint that was begun."""
        final = self.checkpoint(Step(version))
        partial = partial_of(final)
        if partial.exists():
            link_files(self.state_of(version), partial / "trainer")
            remove_folder(final)
            os.replace(partial, final)

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all checkpoints but the newest `keep`."""
        for _, folder in sorted(numbered(self.checkpoints))[:-keep]:
            remove_folder(folder)

    def remove_partial(self) -> None:
        """Remove states and checkpoints that a trainer left when it died."""
        for parent in (self.trainer, self.checkpoints):
            for folder in parent.glob("partial_step_*"):
                shutil.rmtree(folder, ignore_errors=True)

    def remove_batch(self, step: Step) -> None:
        """Remove a batch that cannot be trained, and the rollouts saved with it: both are made again."""
        for folder in (self.batches, self.rollouts):
            remove_folder(folder / f"step_{step}")

    def remove_steps_after(self, step: Step) -> None:
        """Remove what later steps made, which will be trained again."""
        for parent in (self.weights, self.checkpoints, self.trainer):
            for number, folder in numbered(parent):
                if number > step:
                    remove_folder(folder)
        if self.metrics.exists():
            write_whole(self.metrics, MetricsFile(self.metrics).lines_until(step))

    def remove_evals_after(self, version: int) -> None:
        """Remove the results of evaluations of later versions, which will run again."""
        for number, folder in numbered(self.rollouts):
            if number > version:
                (folder / "eval.jsonl").unlink(missing_ok=True)
        if self.evals.exists():
            write_whole(self.evals, MetricsFile(self.evals).lines_until(version))


def remove_folder(folder: Path) -> None:
    """Remove a folder and what is in it, unless another thread or process has removed it.

    The folder is renamed first. A reader that looks it up by its name therefore finds all of it or
    nothing, and of several removers only one gets it. Files that a killed remover left, or that could
    not be removed because a reader on a network file system has them open, go with the next removal.
    """
    with suppress(FileNotFoundError):
        folder.rename(folder.with_name(f"{REMOVED}{uuid.uuid4().hex}"))
    for renamed in folder.parent.glob(f"{REMOVED}*"):
        shutil.rmtree(renamed, ignore_errors=True)


def partial_of(folder: Path) -> Path:
    """Return the folder to write before all of it is there, and it gets its final name."""
    return folder.with_name(f"partial_{folder.name}")


def link_files(source: Path, target: Path) -> None:
    """Make the files of a folder appear in another one, as links if the file system has them."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        linked = target / path.name
        linked.unlink(missing_ok=True)
        try:
            os.link(path, linked)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, linked)


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file so that readers see all of it or nothing. `durable`: also after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    if durable:
        sync(partial)
    os.replace(partial, path)
    if durable:
        sync(path.parent)
        sync(path.parent.parent)  # the folder may be new


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until all files of a folder are on the disk, with their names and that of the folder."""
    for path in [*folder.iterdir(), folder, folder.parent]:
        sync(path)


def numbered(parent: Path) -> list[tuple[int, Path]]:
    """Return what is named `step_N` in `parent`, with its N. The rest is the user's."""
    found = {path: path.name.removeprefix("step_") for path in parent.glob("step_*")}
    return [(int(number), path) for path, number in found.items() if number.isdigit()]


def shown_tree(config: RunConfig) -> dict[str, Any]:
    """Return all keys that have a value, without passwords in URLs: also arguments may be URLs."""
    tree: dict[str, Any] = hide_all_credentials(without_none(msgspec.to_builtins(config)))
    return tree


def without_none(tree: Any) -> Any:
    """Return a tree of dicts and lists without the keys that are None: TOML has no null."""
    if isinstance(tree, dict):
        return {key: without_none(value) for key, value in tree.items() if value is not None}
    if isinstance(tree, (list, tuple)):
        return [without_none(value) for value in tree]
    return tree


@contextmanager
def lock_folder(folder: Path, activity: str) -> Iterator[None]:
    """Keep other processes out while the block lasts. The kernel unlocks if this process dies. A second
    process gets an error that ends with `activity`: "another process trains in outputs/run"."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(f"another process {activity}") from None
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise RunDirError(f"{folder} was removed at this very moment: try again")
        yield
    finally:
        os.close(descriptor)
