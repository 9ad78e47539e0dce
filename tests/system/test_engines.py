"""Runs whose engines die, come back, stay away, or are several: whole processes, killed with -9."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from tests.system.test_train import Workspace

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


@pytest.fixture
def work(tmp_path: Path, tiny_moe: Path) -> Iterator[Workspace]:
    work = Workspace(tmp_path, tiny_moe)
    yield work
    for process in work.processes():
        process.kill()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Engine:
    """`rollway engine` at a port of its own, which can be killed and started again."""

    def __init__(self, work: Workspace, model: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._work = work
        self._command = [
            sys.executable, "-m", "rollway", "engine", "--model", str(model), "--port", str(port),
            "--max-context", "128", "--max-batch", "16", "--renderer", "qwen3",
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        process = self._process = subprocess.Popen(
            self._command, env=self._work.env, text=True, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Serving"):
                return
        raise AssertionError("the engine did not start")

    def kill(self) -> None:
        """With its children, until its port is free."""
        if self._process is None:
            return
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        psutil.wait_procs(children, timeout=10)
        self._process.communicate()
        self._process = None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            text: str = reply.read().decode()
            return text

    @property
    def version(self) -> str:
        return str(json.loads(self.get("/weight_info"))["weight_version"])

    @property
    def num_drawn(self) -> float:
        found = re.search(r"vllm:generation_tokens_total\{.*\} (\S+)", self.get("/metrics"))
        return float(found[1]) if found else 0.0


@contextmanager
def engines(work: Workspace, model: Path, count: int) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        started = [Engine(work, model) for _ in range(count)]
        for one in started:
            stack.callback(one.kill)
            one.start()
        yield started


def at(*engines: Engine) -> str:
    return f"engine.external.url={json.dumps([one.url for one in engines])}"


def trained_once(work: Workspace, steps: int) -> None:
    """Every step has its rows, no rollout trained in two, and none was older than allowed."""
    assert [one["step"] for one in work.metrics()] == list(range(1, steps + 1))
    assert all(one["off_policy/max"] <= 1 for one in work.metrics())
    trained: Counter[str] = Counter()
    for step in range(1, steps + 1):
        manifest = json.loads((work.run / "batches" / f"step_{step}" / "manifest.json").read_text())
        ids = {row["rollout_id"] for row in manifest["rows"]}
        assert len(ids) >= 16
        trained.update(ids)
    assert set(trained.values()) == {1}
    in_ledger = work.ledger(f"SELECT rollout_id FROM rollouts WHERE step <= {steps}")
    assert {id for (id,) in in_ledger} == set(trained)


def why(work: Workspace) -> str:
    command = [sys.executable, "-m", "rollway", "why", str(work.run)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_killed_embedded_engine_is_started_again_and_the_run_goes_on(work: Workspace) -> None:
    """Its model's process is killed, which ends the one before it."""
    with work.training("--set", "max_steps=8") as process:
        (victim,) = work.find("rollway.inference.embedded.decoder:serve_decoder")
        victim.kill()
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    assert re.search(
        r"engine \(pid \d+\) (was killed by SIGKILL|exited with 1) and is started again", out
    )
    assert "Step 8/8" in out
    trained_once(work, 8)
    assert work.ledger("SELECT DISTINCT num_settled FROM rollouts") == [(1,)]
    work.assert_nothing_is_left()


def test_an_engine_that_comes_back_with_old_weights(work: Workspace, tiny_moe: Path) -> None:
    """It is waited for, `why` says so, and it draws nothing before it has the run's weights again."""
    with engines(work, tiny_moe, 1) as (engine,):
        with work.training(
            "--set", "max_steps=8", "--set", f"engine.external.url={engine.url}"
        ) as process:
            work.wait_for_step(process, 3)
            engine.kill()
            deadline = time.monotonic() + 60
            while "no answer for" not in (said := why(work)) and time.monotonic() < deadline:
                time.sleep(0.5)
            assert f"the engine at {engine.url}: no answer for" in said.splitlines()[0]
            time.sleep(5)
            engine.start()
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, err
        assert engine.version == "7"
    assert f"No answer from the engine at {engine.url}" in out
    assert f"The engine at {engine.url} is back after " in out
    trained_once(work, 8)


def test_an_engine_that_never_comes_back_stops_the_run_and_resume_goes_on(
    work: Workspace, tiny_moe: Path
) -> None:
    with engines(work, tiny_moe, 1) as (engine,):
        url = f"engine.external.url={engine.url}"
        patience = "engine.patience_s=4"
        with work.training("--set", "max_steps=500", "--set", url, "--set", patience) as process:
            work.wait_for_step(process, 2)
            engine.kill()
            _, err = process.communicate(timeout=60)
            assert process.returncode == 1
        said = rf"rollway: no answer from the engine at {engine.url} for \d+ s \(.*\), and engine\.pat"
        assert re.match(said, err), err
        assert "start it again, then --resume goes on" in err
        assert err.count("\n") == 1
        last = work.metrics()[-1]["step"]
        engine.start()
        more = work.train("--resume", "--set", url, "--set", f"max_steps={last + 3}")
        assert more.returncode == 0, more.stderr
    trained_once(work, last + 3)


def test_two_engines_one_of_which_misses_a_few_versions(work: Workspace, tiny_moe: Path) -> None:
    with (
        engines(work, tiny_moe, 2) as (first, second),
        work.training("--set", "max_steps=500", "--set", at(first, second)) as process,
    ):
        work.wait_for_step(process, 2)
        assert first.num_drawn > 0
        assert second.num_drawn > 0
        second.kill()
        work.wait_for_step(process, 5)
        second.start()
        deadline = time.monotonic() + 60
        while not second.num_drawn and time.monotonic() < deadline:
            time.sleep(0.2)
        assert second.num_drawn > 0, "it takes part again"
        assert int(second.version) >= 5, "with the weights it missed"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
    assert f"The engine at {second.url} is back after " in out
    trained_once(work, work.metrics()[-1]["step"])
