"""Reports steps that were trained but not reported before their run was interrupted. Calls block."""

from typing import Any

import msgspec

from ..ledger.restore import read_reports
from ..observe.step_metrics import speed
from ..records.ids import PolicyVersion, Step
from ..rundir.metrics_file import MetricsFile
from ..rundir.rundir import STABLE, RunDir
from ..transport.files import find_published, read_manifest


def report_unreported_steps(run: RunDir, last: Step) -> None:
    """Append the missing lines up to step `last` to `metrics.jsonl`.

    A line has the metrics of the batch and those of the trainer. Lags and stalls of that time are lost.
    """
    file, reports = MetricsFile(run.metrics), read_reports(run.ledger)
    for step in map(Step, range(max(0, file.last_step()) + 1, last + 1)):
        batch = reports.get(step) or _manifest_metrics(run, step)
        if batch:
            line = {"step": step, **batch, **_trainer_metrics(run, step, batch), "stalls": []}
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
    published = find_published(run, PolicyVersion(step))
    if published is None:
        return {}
    published_s = _published_s(run, step)
    previous_s = _published_s(run, step - 1)
    rates = speed(batch, published_s - previous_s) if published_s > previous_s > 0 else {}
    return {**rates, **published.metrics, "time": published_s}


def _published_s(run: RunDir, step: int) -> float:
    """Return when the weights of a step were complete, as `time.time()`; 0 if they are gone."""
    marker = run.weights_of(PolicyVersion(step)) / STABLE
    return marker.stat().st_mtime if marker.exists() else 0.0
