"""Runs that start vLLM themselves. A stand-in for its program draws letters at random, in the same
dialect: `make test-vllm` tests with a real vLLM."""

import os
import signal
import stat
import sys
from pathlib import Path

import pytest
from tests.doubles.workspace import Workspace

pytestmark = [pytest.mark.system]

STAND_IN = f"""#!{sys.executable}
import os, sys
from pathlib import Path
sys.path.insert(0, "{Path(__file__).parents[2]}")
from tests.doubles.stand_ins import draw_forever
folder, arguments = sys.argv[2], sys.argv[3:]
port = arguments[arguments.index("--port") + 1]
print("STARTED", os.environ["VLLM_SERVER_DEV_MODE"], len(os.environ["ROLLWAY_ENGINE_KEY"]), *arguments,
      flush=True)
draw_forever(Path(folder), int(port))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "vllm"
    path.write_text(STAND_IN)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_vllm_that_the_run_starts_is_started_again_when_it_dies(
    light: Workspace, program: Path
) -> None:
    work = light
    settings = ["--set", f"engine.vllm.command={program}", "--set", "max_steps=500"]
    with work.training(*settings) as process:
        work.wait_for_step(process, 2)
        log = (work.run / "logs" / "engine.log").read_text()
        assert "STARTED 1 32 " in log
        assert "--worker-extension-cls rollway.vllm.WorkerExtension" in log
        (vllm,) = [found for found in work.processes() if str(program) in found.cmdline()]
        os.kill(vllm.pid, signal.SIGKILL)
        work.wait_for_line(process, "and is started again")
        last = work.metrics()[-1]["step"] + 2
        work.wait_for_step(process, last)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert work.processes() == []


def test_a_vllm_that_cannot_start_ends_the_run_with_its_last_words(
    work: Workspace, program: Path
) -> None:
    program.write_text("#!/bin/sh\necho no model for you\nexit 3\n")
    done = work.train("--set", f"engine.vllm.command={program}")
    assert done.returncode == 1
    assert "exited with 3" in done.stderr
    assert "no model for you" in done.stderr


def test_a_vllm_that_is_not_installed(work: Workspace) -> None:
    done = work.train("--set", "engine.vllm.command=no-such-vllm")
    assert done.returncode == 1
    assert "'engine.vllm.command' = 'no-such-vllm' is not a program" in done.stderr
    assert not work.run.exists()
