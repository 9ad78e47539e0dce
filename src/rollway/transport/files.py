"""The transport through files: manifests and versions appear in the run directory, each complete."""

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from watchfiles._rust_notify import RustNotify

from ..errors import UNREADABLE, PayloadError, RunDirError
from ..loop.lanes.threads import thread
from ..records.batch import BatchManifest
from ..records.engine import Published
from ..records.ids import PolicyVersion, Step
from ..rundir.rundir import STABLE, RunDir, sync_folder, write_whole
from .batch import Batch, decode_manifest

log = logging.getLogger(__name__)

RETRY_S = 1.0
FULL = (errno.ENOSPC, errno.EDQUOT)
LOOK_AGAIN_MS = 1000
"""Look for a file this often even without a notification: some network file systems send none."""


class FileSender:
    """The orchestrator's end: writes manifests, and waits for marks of complete weights."""

    address = ""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    async def serve(self) -> None:
        """Return at once: files need no server."""

    async def ship(self, manifest: BatchManifest) -> None:
        await self.write_manifest(manifest.step, msgspec.json.encode(manifest))

    async def write_manifest(self, step: Step, encoded: bytes) -> None:
        write = partial(write_whole, self._run.manifest(step), encoded, durable=True)
        await when_there_is_room(f"the batch of step {step}", write)

    async def wait_for_version(self, version: PolicyVersion) -> Published:
        await wait_for_file(self._run.weights_of(version) / STABLE)
        return await thread(read_published, self._run, version)


class FileBatches:
    """The trainer's end: batches from step `first` to step `last`."""

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
        await wait_for_file(path)
        encoded, ready_s = await thread(_read_with_time, path)
        batch = Batch(self._next, encoded, str(self._run.payload), ready_s)
        self._next = Step(self._next + 1)
        return batch

    async def publish(self, published: Published) -> None:
        await record_published(self._run, published)


async def record_published(run: RunDir, published: Published) -> None:
    """Record in the run directory that a version is complete, wherever its weights are. What the record
    promises is on the disk before the record is, also after a power failure."""
    version, record = published.version, msgspec.json.encode(published)
    write = partial(_record, run.weights_of(version), record)
    await when_there_is_room(f"the record of version {version}", write)


async def when_there_is_room(what: str, write: Callable[[], None]) -> None:
    """Write a file. While its disk is full, wait for room: a run cannot do without this file."""
    while True:
        try:
            return await thread(write)
        except OSError as error:
            if error.errno not in FULL:
                raise RunDirError(f"cannot write {what}: {error}") from None
            log.warning("cannot write %s (%s): waiting for room", what, error)
            await asyncio.sleep(RETRY_S)


def _record(folder: Path, record: bytes) -> None:
    if folder.exists():
        sync_folder(folder)
    write_whole(folder / STABLE, record, durable=True)


def read_published(run: RunDir, version: PolicyVersion) -> Published:
    """Return the record of a complete version. Blocks."""
    path = run.weights_of(version) / STABLE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Published)
    except (OSError, *UNREADABLE) as error:
        raise PayloadError(f"cannot read {path}: {error}") from None


def read_manifest(path: Path) -> BatchManifest:
    """Read and decode a manifest. Blocks."""
    try:
        encoded = path.read_bytes()
    except OSError as error:
        raise PayloadError(f"cannot read manifest {path}: {error}") from None
    return decode_manifest(encoded, str(path))


def _read_with_time(path: Path) -> tuple[bytes, float]:
    """Return what a file holds, and when it was written."""
    with path.open("rb") as file:
        return file.read(), os.fstat(file.fileno()).st_mtime


async def wait_for_file(path: Path) -> None:
    """Wait until `path` exists. Its parent's parent must exist."""
    stop = threading.Event()
    with RustNotify([str(path.parent.parent)], False, False, 0, True, True) as watcher:
        try:
            while not await thread(path.exists):
                await thread(watcher.watch, 20, 10, LOOK_AGAIN_MS, stop)
        finally:
            stop.set()
