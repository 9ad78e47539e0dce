"""Finds where a run starts: from its model, or where an interrupted run stopped. Calls block."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ..config.sections import RunConfig
from ..errors import ModelError, PayloadError, RunDirError
from ..ledger.restore import read_reports, restore
from ..model.checkpoint import check_whole
from ..observe.step_metrics import speed
from ..payload.reader import SegmentReader
from ..payload.reuse import remove_spares
from ..records.batch import BatchManifest
from ..records.ids import PolicyVersion, Step
from ..records.payload import PayloadRef
from ..records.restored import KeptPayload, Restored, StartPoint
from ..rundir.metrics_file import MetricsFile
from ..rundir.rundir import STABLE, RunDir, remove_folder
from ..transport.files import read_manifest, read_published

Say = Callable[[str], None]


def find_start_point(
    config: RunConfig, run: RunDir, *, resume: bool, say: Say = lambda text: None
) -> StartPoint:
    """Return where the run starts. A run that has begun is resumed only on request, and never
    overwritten. `say` hears of versions that turn out to be damaged."""
    if not run.has_begun:
        return StartPoint(Step(1), str(Path(config.model.path).resolve()))
    if not resume:
        refuse_to_overwrite(run)
    return find_resume_point(config, run, say)


def refuse_to_overwrite(run: RunDir) -> None:
    """Raise RunDirError if there is a run that has begun."""
    if run.has_begun:
        raise RunDirError(
            f"{run.path} already holds a run: --resume continues it, --clean starts over"
        )


def find_resume_point(
    config: RunConfig, run: RunDir, say: Say = lambda text: None
) -> StartPoint:
    """Return the last published version and all that was not trained.

    Steps that were trained but not reported are reported now. Whatever the run will make again, or never
    read again, is removed: unfinished weights, batches that lost payload, unused payload.
    """
    published, weights = _find_last_whole(config, run, say)
    last = Step(published)
    run.remove_steps_after(last)
    report_unreported_steps(run, last)
    reader = SegmentReader(run.payload)
    shipped = _read_shipped_after(run, last)
    trained = _read_last_trained(run, last)
    restored = restore(run.ledger, trained, shipped, lambda ref: _is_intact(reader, ref))
    _check_envs(config, run, restored)
    if config.trainer is not None:
        restored = replace(restored, kept=_read_kept(run, published))
    kept = {batch.manifest.step for batch in restored.batches}
    for manifest in shipped:
        if manifest.step not in kept:
            run.remove_batch(manifest.step)
    run.remove_evals_after(-1 if restored.evaluated is None else restored.evaluated)
    _remove_unused(run, reader, restored)
    return StartPoint(
        first_step=Step(last + 1),
        weights=str(weights),
        restored=restored,
        generation=run.next_generation(),
    )


def _find_last_whole(config: RunConfig, run: RunDir, say: Say) -> tuple[PolicyVersion, Path]:
    """Return the newest version whose weights are whole, and their folder. After a power failure, files
    of the newest may be cut off although it is marked as complete. Then the one before is taken."""
    version = run.last_published()
    while True:
        weights = _find_weights(config, run, version)
        try:
            check_whole(weights)
            return version, weights
        except ModelError as error:
            damaged = run.weights_of(version)
            if not version or not run.has_version(before := PolicyVersion(version - 1)):
                raise RunDirError(
                    f"{run.path} cannot be resumed: {error}, and no older version is left; "
                    "--clean starts over"
                ) from None
            say(f"{error}: going on from step {before}, whose weights are complete")
            remove_folder(damaged)
            version = before


def _find_weights(config: RunConfig, run: RunDir, version: PolicyVersion) -> Path:
    """Return the folder of a version: in the run directory, or where the user's trainer wrote it.

    Version 0 is the model itself. It need not exist: an interrupted warm-up is started again.
    """
    if not version:
        return Path(config.model.path).resolve()
    folder = run.weights_of(version)
    if not (folder / "config.json").exists():
        folder = Path(read_published(run, version).path)
    if not folder.exists():
        raise RunDirError(
            f"{run.path} cannot be resumed: the weights of step {version} are gone from {folder}; "
            "--clean starts over"
        )
    return folder


def _read_kept(run: RunDir, published: PolicyVersion) -> tuple[KeptPayload, ...]:
    """Return the payload of the batches that the trainer trains again: those after its last state."""
    after = run.last_state(published) or 0
    manifests = [run.manifest(Step(step)) for step in range(after + 1, published + 1)]
    return tuple(
        KeptPayload(PolicyVersion(manifest.step), manifest.refs)
        for manifest in map(read_manifest, filter(Path.exists, manifests))
    )


def _check_envs(config: RunConfig, run: RunDir, restored: Restored) -> None:
    unknown = {group.env for group in restored.groups} - {env.id for env in config.env}
    if unknown:
        raise RunDirError(
            f"{run.path} has rollouts of environment '{min(unknown)}', which the run file no longer "
            "names: put it back, or --clean starts over"
        )


def _read_shipped_after(run: RunDir, last: Step) -> list[BatchManifest]:
    manifests: list[BatchManifest] = []
    while (path := run.manifest(Step(last + len(manifests) + 1))).exists():
        manifests.append(read_manifest(path))
    return manifests


def _read_last_trained(run: RunDir, last: Step) -> list[BatchManifest]:
    """Return the manifests of the last trained steps, which the ledger may not have recorded."""
    steps = range(max(1, last - 2), last + 1)
    paths = [run.manifest(Step(step)) for step in steps]
    return [read_manifest(path) for path in paths if path.exists()]


def _is_intact(reader: SegmentReader, ref: PayloadRef) -> bool:
    try:
        reader.verify(ref)
    except PayloadError:
        return False
    return True


def _remove_unused(run: RunDir, reader: SegmentReader, restored: Restored) -> None:
    for segment in set(reader.segments()) - {ref.segment for ref in restored.refs}:
        reader.remove(segment)
    remove_spares(run.payload)


def report_unreported_steps(run: RunDir, last: Step) -> None:
    """Append the missing lines up to step `last` to `metrics.jsonl`.

    A line has the metrics of the batch and those of the trainer. Lags and stalls of that time are lost.
    """
    file, reports = MetricsFile(run.metrics), read_reports(run.ledger)
    for step in map(Step, range(max(0, file.last_step()) + 1, last + 1)):
        batch = reports.get(step) or _manifest_metrics(run, step)
        if batch:
            trained = _trainer_metrics(run, step, batch)
            line = {"step": step, **batch, **trained, "stalls": []}
            file.append(msgspec.json.encode(line))


def _manifest_metrics(run: RunDir, step: Step) -> dict[str, float]:
    """Return the metrics that a batch's manifest alone gives; none if the manifest is gone."""
    path = run.manifest(step)
    if not path.exists():
        return {}
    manifest = read_manifest(path)
    return {
        "batch/rollouts": len({row.rollout_id for row in manifest.rows}),
        "batch/rows": len(manifest.rows),
        "batch/tokens": manifest.num_tokens,
        "batch/micro_batches": len(manifest.micro_batches),
    }


def _trainer_metrics(run: RunDir, step: Step, batch: dict[str, float]) -> dict[str, Any]:
    """Return the trainer's metrics of a step, and its duration: from one version on disk to the next."""
    try:
        published = read_published(run, PolicyVersion(step))
    except PayloadError:
        return {}  # the weights are pruned
    published_s = _published_s(run, step)
    previous_s = _published_s(run, step - 1)
    rates = speed(batch, published_s - previous_s) if published_s > previous_s > 0 else {}
    return {**rates, **published.metrics, "time": published_s}


def _published_s(run: RunDir, step: int) -> float:
    """Return when the weights of a step were complete, as `time.time()`; 0 if they are gone."""
    marker = run.weights_of(PolicyVersion(step)) / STABLE
    return marker.stat().st_mtime if marker.exists() else 0.0
