"""What a whole run says of itself while it runs: stalls with their names, metrics over HTTP."""

import re
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
from tests.doubles import credit
from tests.doubles.stand_ins import CopyingTrainer
from tests.doubles.workspace import DEADLINE_S, ENVS, Workspace

pytestmark = [pytest.mark.system]

CREDIT = Path(credit.__file__)


def place(path: Path, text: str, after: str) -> str:
    """file:line of the first line with `text` below the one with `after`."""
    lines = path.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if after in line)
    return f"{path}:{next(n for n in range(first, len(lines)) if text in lines[n]) + 1}"


IN_ROLLOUT = place(ENVS, "time.sleep", "class Planted")
IN_REWARD = place(ENVS, "time.sleep", "def ponder")
IN_ADVANTAGE = place(CREDIT, "time.sleep", "def slow")


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
        return text


def train_and_scrape(
    work: Workspace, trainer: CopyingTrainer, port: int, options: list[str]
) -> tuple[str, str]:
    """Return what was scraped after the second step, and all that was on the console."""
    with work.training(*options) as process:
        work.wait_for_step(process, 2)
        text = scraped(port)
        trainer.release()
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
    return text, "".join(work.printed) + out


def test_blocking_calls_are_named_in_log_metrics_console_and_prometheus(
    light: Workspace, trainer: CopyingTrainer, port: int
) -> None:
    """One in an environment's rollout, one in a reward, one in an advantage function."""
    trainer.hold_at(3)
    options = {
        "env.0.args.kind": "Planted", "orchestrator.advantage": f"{CREDIT}:slow",
        "metrics.prometheus.port": port, "max_steps": 3, "env.0.server.workers": 2,
    }  # fmt: skip
    overrides = [
        word for key, value in options.items() for word in ("--set", f"{key}={value}")
    ]
    text, out = train_and_scrape(light, trainer, port, overrides)
    assert "rollway_slow_calls_total{" in text
    check_metrics(light)
    check_logs(light.run / "logs")
    for pattern in (
        rf"^Whole run, envs\.w\d: loop held .* by {IN_ROLLOUT} in Planted\.rollout$",
        rf"^Whole run, envs\.w\d: reward `Planted\.right` took .* in its process, at {IN_REWARD} "
        r"in ponder \(no loop was held\)$",
        rf"^Whole run, orchestrator: advantage `slow` took .* at {IN_ADVANTAGE} in slow",
        rf"^envs\.w\d: loop held .* by {IN_ROLLOUT}",
    ):
        assert re.search(pattern, out, re.MULTILINE), (pattern, out)
    light.assert_nothing_is_left()


def check_metrics(work: Workspace) -> None:
    lines = work.metrics()
    named = {
        (stall["kind"], stall["where"], stall["call"])
        for line in lines
        for stall in line["stalls"]
    }
    assert ("loop", IN_ROLLOUT, "") in named
    assert ("lane", IN_REWARD, "reward `Planted.right`") in named
    assert ("lane", IN_ADVANTAGE, "advantage `slow`") in named
    assert sum(line.get(f"stalls/envs.w{n}/count", 0) for line in lines for n in (0, 1)) > 0
    assert sum(line.get("slow_calls/orchestrator/seconds", 0) for line in lines) > 0.3
    for line in lines:
        assert line["event_loop_lag/p99"] == line["event_loop_lag/orchestrator/p99"]
        phases = ("wait_rollouts", "hold", "credit", "ship")
        assert all(line[f"time/{phase}"] >= 0 for phase in phases)
        assert line["time/credit"] > 0.3
    assert any("time/update_weights" in line for line in lines)


def check_logs(folder: Path) -> None:
    workers = "".join(path.read_text() for path in folder.glob("envs.w*.log"))
    assert f"by {IN_ROLLOUT} in Planted.rollout" in workers
    assert f"at {IN_REWARD} in ponder (no loop was held)" in workers
    assert (
        f"at {IN_ADVANTAGE} in slow (no loop was held)"
        in (folder / "orchestrator.log").read_text()
    )


def test_an_advantage_function_that_fails_ends_the_run_with_its_line(
    light: Workspace,
) -> None:
    done = light.train("--set", f"orchestrator.advantage={CREDIT}:raises")
    assert done.returncode == 1
    where = place(CREDIT, "raise KeyError", "def raises")
    assert (
        f"orchestrator.advantage '{CREDIT}:raises' failed at {where} in raises: KeyError: 'no baseline'"
        in (done.stderr)
    )
    assert done.stderr.count("\n") == 2, done.stderr
    light.assert_nothing_is_left()


def test_mistakes_are_said_before_anything_starts(light: Workspace) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        mistakes = {
            f"metrics.prometheus.port={port}": f"'metrics.prometheus.port' = {port} cannot be bound",
            f"orchestrator.advantage={CREDIT}:sloww": "did you mean 'slow'?",
        }
        for mistake, said in mistakes.items():
            failed: subprocess.CompletedProcess[str] = light.train(
                "--clean", "--set", mistake
            )
            assert failed.returncode == 1
            assert said in failed.stderr
            assert failed.stderr.count("\n") == 1, failed.stderr
            assert "Starting" not in failed.stdout
            assert not light.processes()
