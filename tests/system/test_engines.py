"""Runs whose engines die, come back, stay away, or are several."""

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.doubles.stand_ins import CopyingTrainer, DrawingEngine, drawing_engines
from tests.doubles.workspace import DEADLINE_S, Workspace

pytestmark = [pytest.mark.system]


def check_steps(work: Workspace, steps: int) -> None:
    """Every step has its rows, no rollout trained in two, and none was older than allowed."""
    lines = work.metrics()[:steps]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["off_policy/max"] <= 1 for line in lines)
    trained: Counter[str] = Counter()
    for step in range(1, steps + 1):
        manifest = json.loads(
            (work.run / "batches" / f"step_{step}" / "manifest.json").read_text()
        )
        ids = {row["rollout_id"] for row in manifest["rows"]}
        assert len(ids) >= 16
        trained.update(ids)
    assert set(trained.values()) == {1}
    in_ledger = work.ledger(f"SELECT rollout_id FROM rollouts WHERE step <= {steps}")
    assert {rollout_id for (rollout_id,) in in_ledger} == set(trained)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_embedded_engine_is_started_again_and_a_killed_launcher_takes_all_along(
    work: Workspace,
) -> None:
    """The model's process is killed, which ends the engine's own. Later the launcher is killed, which
    ends all: engine, trainer, orchestrator, router and worker."""
    with work.training("--set", "max_steps=500") as process:
        (victim,) = work.find("rollway.inference.embedded.decoder:serve_decoder")
        victim.kill()
        lines = work.wait_for_line(process, "and is started again")
        assert re.search(
            r"engine \(pid \d+\) (was killed by SIGKILL|exited with 1) and is started again",
            lines[-1],
        )
        last = work.metrics()[-1]["step"] + 3
        if not any(line.startswith(f"Step {last}/") for line in lines):
            work.wait_for_step(process, last)
        assert len(work.processes()) > 6
        process.kill()
    work.assert_nothing_is_left(was_killed=True)
    check_steps(work, last)
    settled = "SELECT DISTINCT num_settled FROM rollouts WHERE outcome IS NOT NULL"
    assert work.ledger(settled) == [(1,)]


def test_an_engine_that_comes_back_with_old_weights(
    light: Workspace, engine: DrawingEngine, trainer: CopyingTrainer
) -> None:
    """The run waits, `why` says so, and the engine draws nothing before it has the run's weights."""
    trainer.hold_at(4)
    with light.training("--set", "max_steps=8") as process:
        light.wait_for_step(process, 3)
        engine.kill()
        trainer.release()
        wait_until(lambda: "no answer for" in light.why())
        assert f"the engine at {engine.url}: no answer for" in light.why().splitlines()[0]
        engine.open()
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
    assert engine.version == "7"
    assert "default" not in {version for _, version in engine.requests}
    assert f"No answer from the engine at {engine.url}" in out
    assert f"The engine at {engine.url} is back after " in out
    check_steps(light, 8)


@pytest.mark.long
def test_an_engine_that_never_comes_back_stops_the_run_and_resume_continues_it(
    light: Workspace, engine: DrawingEngine
) -> None:
    with light.training("--set", "max_steps=500", "--set", "engine.patience_s=2") as process:
        light.wait_for_step(process, 2)
        engine.kill()
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
    message = rf"rollway: no answer from the engine at {engine.url} for \d+ s \(.*\), and engine\.pat"
    assert re.match(message, err), err
    assert "--resume continues from here" in err
    assert err.splitlines()[1].endswith(" --resume")
    last = light.metrics()[-1]["step"] + 3
    engine.open()
    resumed = light.train("--resume", "--set", f"max_steps={last}")
    assert resumed.returncode == 0, resumed.stderr
    check_steps(light, last)


@pytest.fixture
def engines(tiny_moe: Path) -> Iterator[list[DrawingEngine]]:
    with drawing_engines(tiny_moe, 2) as engines:
        yield engines


def test_two_engines_one_of_which_misses_a_few_versions(
    tmp_path: Path, tiny_moe: Path, engines: list[DrawingEngine], trainer: CopyingTrainer
) -> None:
    first, second = engines
    work = Workspace(tmp_path, tiny_moe, engines=[first.url, second.url], trainer=trainer)
    trainer.hold_at(3)
    with work.training("--set", "max_steps=500") as process:
        work.wait_for_step(process, 2)
        assert first.num_drawn > 0
        assert second.num_drawn > 0
        second.kill()
        trainer.hold_at(6)
        work.wait_for_step(process, 5)
        second.open()
        wait_until(lambda: second.version == "5")
        trainer.release()
        wait_until(lambda: second.num_drawn > 0)
        assert min(int(version) for _, version in second.requests) >= 5, (
            "with the weights it missed"
        )
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
    assert f"The engine at {second.url} is back after " in out
    check_steps(work, work.metrics()[-1]["step"])
    work.assert_nothing_is_left()
