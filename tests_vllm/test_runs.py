"""Whole runs with a vLLM that rollway starts: deaths, Ctrl-C, a window that is always too small."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests_vllm.servers import PROGRAM, Run, command, train

OWN = f'vllm = {{ command = "{PROGRAM}" }}'


def vllm_pids() -> list[int]:
    """Return the processes of vLLM: its API server and what that started."""
    listed = subprocess.run(["ps", "-eo", "pid=,stat=,args="], capture_output=True, text=True)
    found = re.findall(r"(?m)^ *(\d+) [^Z]\S* .*(?:vllm serve|VLLM::)", listed.stdout)
    return [int(pid) for pid in found]


def num_failed(metrics: dict[str, float]) -> float:
    """Return how many rollouts failed in a step, or were run again."""
    failed = sum(value for key, value in metrics.items() if key.startswith("errors/"))
    return failed + metrics.get("retries", 0)


def api_server() -> int:
    return min(vllm_pids())


def train_and_disturb(folder: Path, model: Path, number: int, steps: int = 12) -> Run:
    """Send a signal to vLLM in the middle of a run, and wait for the run's end."""
    argv = command(folder, model, OWN, steps=steps)
    with (folder / "out.txt").open("w+") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
        while "Step 3/" not in (folder / "out.txt").read_text():
            assert process.poll() is None, (folder / "out.txt").read_text()
            time.sleep(0.2)
        os.kill(api_server(), number)
        code = process.wait(timeout=300)
    return Run(code, (folder / "out.txt").read_text(), folder / "run")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_vllm_that_dies_is_started_again(
    tmp_path: Path, moe: Path, number: signal.Signals
) -> None:
    """It gets the newest weights, is verified, and no rollout is lost."""
    run = train_and_disturb(tmp_path, moe, number)
    assert run.code == 0, run.text
    assert "is started again" in run.text
    assert "is back after" in run.text
    assert len(run.metrics) == 12
    for metrics in run.metrics:
        assert num_failed(metrics) == 0, run.text
    fresh_kls = [
        value
        for metrics in run.metrics
        for key, value in metrics.items()
        if "fresh_kl/" in key
    ]
    assert fresh_kls
    assert max(fresh_kls) < 1e-6
    assert vllm_pids() == []


def test_ctrl_c_leaves_nothing(tmp_path: Path, moe: Path) -> None:
    process = subprocess.Popen(command(tmp_path, moe, OWN, steps=500))
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists():
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert vllm_pids() == []


@pytest.mark.parametrize("engine", [OWN, "embedded = {}"], ids=["vllm", "embedded"])
def test_a_window_that_every_rollout_overruns(tmp_path: Path, moe: Path, engine: str) -> None:
    run = train(
        tmp_path, moe, engine, "engine.max_context=256", "env.0.args={turns=20, padding=40}",
        steps=3,
    )  # fmt: skip
    assert run.code == 0, run.text
    for metrics in run.metrics:
        assert metrics["stop/context"] == 1.0
        assert num_failed(metrics) == 0, run.text
        assert metrics["rows/left_out"] == 0
        assert metrics["seq_len/max"] <= 256


def test_a_run_that_is_killed_leaves_no_vllm(tmp_path: Path, moe: Path) -> None:
    """Its engine does not notice that the server is gone; a guard ends it."""
    process = subprocess.Popen(command(tmp_path, moe, OWN, steps=500), start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists():
        assert process.poll() is None
        time.sleep(0.2)
    assert vllm_pids()
    process.kill()
    process.wait()
    until_s = time.monotonic() + 30
    while vllm_pids():
        assert time.monotonic() < until_s, vllm_pids()
        time.sleep(0.2)
