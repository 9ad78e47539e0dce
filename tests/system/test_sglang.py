"""Whole runs on a server that speaks SGLang's dialect. A real SGLang was never run."""

from pathlib import Path

import pytest
from tests.doubles.sglang import sglang_double
from tests.doubles.stand_ins import CopyingTrainer, DrawingEngine
from tests.doubles.workspace import Workspace

pytestmark = [pytest.mark.system]


def work_with(
    folder: Path, model: Path, url: str, trainer: CopyingTrainer | None = None
) -> Workspace:
    """Return a workspace whose engine returns routes and is verified."""
    work = Workspace(folder, model, engines=[url], trainer=trainer)
    text = work.file.read_text().replace("routes = false", "").replace("verify = false", "")
    work.file.write_text(text)
    return work


@pytest.mark.long
def test_a_run_with_routes_and_verified_loads(
    tmp_path: Path, tiny_moe: Path, engine_url: str
) -> None:
    with sglang_double(engine_url) as double:
        work = work_with(tmp_path, tiny_moe, double.url)
        done = work.train("--set", "max_steps=3")
    assert done.returncode == 0, done.stderr
    assert double.paths[:4] == [
        "/update_weight_version",
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    log = (work.run / "logs" / "orchestrator.log").read_text()
    assert log.count("tokens differ by") == 3
    assert log.count("100% of the expert choices agree") == 3
    assert work.metrics()[0]["mismatch_kl"] < 1e-5
    fresh = [
        value for step in work.metrics() for key, value in step.items() if "fresh_kl" in key
    ]
    assert fresh
    assert max(fresh) < 1e-5


def test_a_server_that_cannot_be_trained_on(
    tmp_path: Path, tiny_moe: Path, engine: DrawingEngine, trainer: CopyingTrainer
) -> None:
    with sglang_double(engine.url, has_routes=False) as double:
        done = work_with(tmp_path, tiny_moe, double.url, trainer).train()
    assert done.returncode == 1
    for text in ("does not return routes", "--enable-return-routed-experts"):
        assert text in done.stderr


@pytest.mark.long
def test_a_server_that_ignores_weights(
    tmp_path: Path, tiny_moe: Path, engine_url: str
) -> None:
    with sglang_double(engine_url, ignores_loads=True) as double:
        work = work_with(tmp_path, tiny_moe, double.url)
        done = work.train("--set", "max_steps=3")
    assert done.returncode == 1
    for text in ("is out of service", "went 0% of the way"):
        assert text in done.stderr
