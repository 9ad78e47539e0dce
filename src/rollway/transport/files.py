"""Batches and versions through the run directory: a file is there whole, or not at all."""

import os
import threading
from pathlib import Path

import msgspec
from watchfiles._rust_notify import RustNotify

from ..errors import UNREADABLE, PayloadError
from ..loop.lanes.lanes import thread
from ..records.batch import BatchManifest
from ..records.engine import Published
from ..records.ids import PolicyVersion, Step
from ..rundir.rundir import STABLE, RunDir, write_whole
from .batch import Batch, decode_manifest


class FileSender:
    """The orchestrator's side."""

    address = ""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    async def serve(self) -> None:
        """Nothing: files lie there by themselves."""

    async def ship(self, manifest: BatchManifest) -> None:
        await self.write(manifest.step, msgspec.json.encode(manifest))

    async def write(self, step: Step, encoded: bytes) -> None:
        await thread(write_whole, self._run.manifest(step), encoded)

    async def next_version(self, version: PolicyVersion) -> Published:
        path = self._run.weights_of(version) / STABLE
        await appear(path)
        return msgspec.json.decode(await thread(path.read_bytes), type=Published)


class FileBatches:
    """The trainer's side, from step `first` to step `last`."""

    def __init__(self, run: RunDir, first: Step, last: int) -> None:
        self._run = run
        self._next = first
        self._last = last

    def __aiter__(self) -> "FileBatches":
        return self

    async def __anext__(self) -> Batch:
        if self._next > self._last:
            raise StopAsyncIteration
        path = self._run.manifest(self._next)
        await appear(path)
        encoded, came_s = await thread(_read, path)
        batch = Batch(self._next, encoded, str(self._run.payload), came_s)
        self._next = Step(self._next + 1)
        return batch

    async def publish(self, published: Published) -> None:
        await mark_stable(self._run, published)


async def mark_stable(run: RunDir, published: Published) -> None:
    """Note in the run directory that a version is complete, wherever its weights lie."""
    marker = run.weights_of(published.version) / STABLE
    await thread(write_whole, marker, msgspec.json.encode(published))


def read_stable(run: RunDir, version: PolicyVersion) -> Published:
    """The record of a version that is complete. Blocks."""
    path = run.weights_of(version) / STABLE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Published)
    except (OSError, *UNREADABLE) as error:
        raise PayloadError(f"cannot read {path}: {error}") from None


def read_manifest(path: Path) -> BatchManifest:
    """Blocks."""
    try:
        encoded = path.read_bytes()
    except OSError as error:
        raise PayloadError(f"cannot read manifest {path}: {error}") from None
    return decode_manifest(encoded, str(path))


def read_published(run: RunDir, version: PolicyVersion) -> Published | None:
    """The same; None if its weights are not complete, or gone. Blocks."""
    try:
        return read_stable(run, version)
    except PayloadError:
        return None


def _read(path: Path) -> tuple[bytes, float]:
    """A file, and since when it is there."""
    with path.open("rb") as file:
        return file.read(), os.fstat(file.fileno()).st_mtime


LOOK_AGAIN_MS = 1000
"""Look anyway this often: some network file systems never notify."""


async def appear(path: Path) -> None:
    """Return once `path` exists. Its parent's parent must exist."""
    watched = path.parent.parent
    stop = threading.Event()
    with RustNotify([str(watched)], False, False, 0, True, True) as watcher:
        try:
            while not await thread(path.exists):
                await thread(watcher.watch, 20, 10, LOOK_AGAIN_MS, stop)
        finally:
            stop.set()
