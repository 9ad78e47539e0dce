"""Manifests and weights through the run directory: a file is there whole, or not at all."""

from pathlib import Path

import msgspec

from ..errors import PayloadError
from ..loop.lanes import thread
from ..records.batch import BatchManifest
from ..records.ids import PolicyVersion, Step
from ..records.policy import Published
from ..rundir.rundir import STABLE, RunDir, write_whole
from .appear import appear


async def ship(run: RunDir, manifest: BatchManifest) -> None:
    """Hand a batch to the trainer."""
    await thread(write_whole, run.manifest(manifest.step), msgspec.json.encode(manifest))


async def next_manifest(run: RunDir, step: Step) -> Path:
    """Where the manifest of `step` lies, once it does."""
    path = run.manifest(step)
    await appear(path)
    return path


def read_manifest(path: Path) -> BatchManifest:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BatchManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise PayloadError(f"cannot read manifest {path}: {error}") from None


async def publish(published: Published) -> None:
    """Say that a version's weights are complete."""
    await thread(write_whole, Path(published.path) / STABLE, msgspec.json.encode(published))


def read_published(path: Path) -> Published | None:
    """The record of a version, from its folder; None if its weights are not complete, or gone."""
    try:
        return msgspec.json.decode((path / STABLE).read_bytes(), type=Published)
    except (OSError, msgspec.MsgspecError):
        return None


async def next_version(run: RunDir, version: PolicyVersion) -> Published:
    """The record of `version`, once its weights are complete."""
    path = run.weights_of(version) / STABLE
    await appear(path)
    return msgspec.json.decode(await thread(path.read_bytes), type=Published)
