"""Where an interrupted run goes on: its last weights, and all that was not trained. Blocks."""

from pathlib import Path

from ..config.sections import RunConfig
from ..errors import PayloadError, RunDirError
from ..ledger.restore import restore
from ..payload.reader import SegmentReader
from ..payload.reuse import drop_spares
from ..records.batch import BatchManifest
from ..records.ids import PolicyVersion, Step
from ..records.payload import PayloadRef
from ..records.restored import Restored, StartPoint
from ..rundir.rundir import RunDir
from ..transport.files import read_manifest, read_stable
from .unreported import report_the_rest


def start_point(config: RunConfig, run: RunDir, *, resume: bool) -> StartPoint:
    """From the model, or from where the run was; an existing run is never overwritten unasked."""
    if not run.exists:
        return StartPoint(Step(1), str(Path(config.model.path).resolve()))
    if not resume:
        raise RunDirError(f"{run.path} holds a run already: --resume goes on, --clean starts over")
    return resume_point(config, run)


def resume_point(config: RunConfig, run: RunDir) -> StartPoint:
    """From the last version that was published, with the optimizer that made it.

    What is half-written is removed: weights, batches that lost payload, payload nobody will read.
    A step that was trained and not reported is reported now.
    """
    published = run.last_published()
    weights = _weights(run, published) if published else Path(config.model.path).resolve()
    if not weights.exists():
        raise RunDirError(
            f"{run.path} cannot go on: the weights of step {published} are gone from {weights}"
        )
    last = Step(published)
    run.remove_steps_after(last)
    report_the_rest(run, last)
    reader = SegmentReader(run.payload)
    shipped = _shipped_after(run, last)
    trained = _last_trained(run, last)
    restored = restore(run.ledger, trained, shipped, lambda ref: _is_intact(reader, ref))
    _check_envs(config, run, restored)
    kept = {batch.manifest.step for batch in restored.batches}
    for manifest in shipped:
        if manifest.step not in kept:
            run.remove_batch(manifest.step)
    run.remove_evals_after(-1 if restored.evaluated is None else restored.evaluated)
    _remove_unused(run, reader, restored)
    return StartPoint(
        first_step=Step(last + 1),
        weights=str(weights),
        optimizer=_optimizer(run, published),
        restored=restored,
        generation=run.next_generation(),
    )


def _weights(run: RunDir, version: PolicyVersion) -> Path:
    """Where a version lies: in the run directory, or where a trainer of the user's wrote it."""
    ours = run.weights_of(version)
    return ours if (ours / "config.json").exists() else Path(read_stable(run, version).path)


def _optimizer(run: RunDir, published: PolicyVersion) -> str | None:
    """As it was at that version; of the last checkpoint if that is gone; none before the first step."""
    path = run.optimizer_of(published)
    if not path.exists():
        checkpoint = run.last_checkpoint()
        path = run.checkpoint(checkpoint) / "optimizer.pt" if checkpoint else path
    return str(path) if path.exists() else None


def _check_envs(config: RunConfig, run: RunDir, restored: Restored) -> None:
    known = {env.id for env in config.env}
    strange = {group.env for group in restored.groups} - known
    if strange:
        raise RunDirError(
            f"{run.path} has rollouts of environment '{min(strange)}', which the run file does not name "
            "any more: put it back, or --clean starts over"
        )


def _shipped_after(run: RunDir, last: Step) -> list[BatchManifest]:
    found: list[BatchManifest] = []
    while (path := run.manifest(Step(last + len(found) + 1))).exists():
        found.append(read_manifest(path))
    return found


def _last_trained(run: RunDir, last: Step) -> list[BatchManifest]:
    """Those of which the ledger may not have heard."""
    steps = [Step(step) for step in range(max(1, last - 2), last + 1)]
    return [read_manifest(run.manifest(step)) for step in steps if run.manifest(step).exists()]


def _is_intact(reader: SegmentReader, ref: PayloadRef) -> bool:
    try:
        reader.verify(ref)
    except PayloadError:
        return False
    return True


def _remove_unused(run: RunDir, reader: SegmentReader, restored: Restored) -> None:
    members = [m for batch in restored.batches for one in batch.closed for m in one.group.members]
    ends = [one.outcome for group in restored.groups for one in group.settled]
    used = {one.scored.ref.segment for one in members}
    used |= {ref.segment for end in ends if (ref := getattr(end, "ref", None))}
    for segment in reader.segments():
        if segment not in used:
            reader.remove(segment)
    drop_spares(run.payload)
