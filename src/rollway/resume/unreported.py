"""Steps that were trained, but not reported before their run ended. Blocks."""

from typing import Any

import msgspec

from ..ledger.restore import reports
from ..observe.step_metrics import speed
from ..records.ids import PolicyVersion, Step
from ..rundir.metrics_file import MetricsFile
from ..rundir.rundir import STABLE, RunDir
from ..transport.files import read_manifest, read_published


def report_the_rest(run: RunDir, last: Step) -> None:
    """Append their lines to `metrics.jsonl`, up to step `last`: what their batches said and what the
    trainer said. How the processes did at that time, nobody knows any more."""
    file, told = MetricsFile(run.metrics), reports(run.ledger)
    for step in map(Step, range(max(0, file.last_step()) + 1, last + 1)):
        batch = told.get(step) or _of_manifest(run, step)
        if batch:
            line = {"step": step, **batch, **_of_trainer(run, step, batch), "stalls": []}
            file.append(msgspec.json.encode(line))


def _of_manifest(run: RunDir, step: Step) -> dict[str, float]:
    """The least that is known of a batch; nothing without its manifest."""
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


def _of_trainer(run: RunDir, step: Step, batch: dict[str, float]) -> dict[str, Any]:
    """What it said of the step, and how long that took: from one version on disk to the next."""
    published = read_published(run, PolicyVersion(step))
    if published is None:
        return {}
    at_s = _published_s(run, step)
    before_s = _published_s(run, step - 1)
    took = speed(batch, at_s - before_s) if at_s > before_s > 0 else {}
    return {**took, **published.metrics, "time": at_s}


def _published_s(run: RunDir, step: int) -> float:
    """When the weights of a step were complete; 0 if they are gone."""
    marker = run.weights_of(PolicyVersion(step)) / STABLE
    return marker.stat().st_mtime if marker.exists() else 0.0
