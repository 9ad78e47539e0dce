"""Every end says how far the run has come and what to type next, and that command works."""

import re
import signal
import time

import pytest
from tests.doubles.workspace import DEADLINE_S, Workspace

pytestmark = pytest.mark.system

ORCHESTRATOR = "rollway.orchestrator.shell.main:main"


def last_line(errors: str) -> str:
    return errors.strip().splitlines()[-1]


def test_ctrl_c_while_models_load_and_the_same_command_again(work: Workspace) -> None:
    with work.started("--set", "max_steps=1") as process:
        work.wait_for_line(process, "^Starting: trainer, engine, 1 env workers, orchestrator")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    begin_again = f"rollway train {work.file} --set max_steps=1"
    assert (
        last_line(errors) == f"Stopped. No rollout was run yet. To start over: {begin_again}"
    )
    work.assert_nothing_is_left()
    done = work.train("--set", "max_steps=4")
    assert done.returncode == 0, done.stderr
    memory = {key: value for line in work.metrics() for key, value in line.items()}
    for name in ("engine-decoder", "trainer-rank"):
        assert memory[f"rss/{name}"] > 20e6, "processes that can run out of memory"


def test_ctrl_c_while_an_environment_is_checked(light: Workspace) -> None:
    (light.folder / "slow.py").write_text("import time\n\ntime.sleep(1000)\n")
    with light.started("--set", "env.0.id=slow.py") as process:
        while not light.find("check-slow.py0"):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert last_line(errors) == (
        f"Stopped before anything was started. To start over: rollway train {light.file} --set "
        "env.0.id=slow.py"
    )
    assert not light.processes()
    assert not light.run.exists()


def test_ctrl_c_after_a_resume_counts_the_steps_of_before(light: Workspace) -> None:
    assert light.trainer is not None
    with light.training() as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    stopped = re.fullmatch(
        r"Stopped. (\d) of 4 steps are trained. To continue: (rollway train .* --resume)",
        last_line(errors),
    )
    assert stopped, errors
    with light.started("--resume") as process:
        light.wait_for_line(process, "^Waiting for your trainer")
        light.trainer.stop()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert int(last_line(errors).split()[1]) >= int(stopped[1]) > 0


def test_a_process_that_is_killed_ends_the_run_with_the_command_to_continue(
    light: Workspace,
) -> None:
    with light.training() as process:
        (orchestrator,) = light.find(ORCHESTRATOR)
        orchestrator.kill()
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "orchestrator (pid" in errors
    assert re.fullmatch(
        r"\d of 4 steps are trained. To continue: rollway train \S+ --resume",
        last_line(errors),
    ), errors
    done = light.train("--resume")
    assert done.returncode == 0, done.stderr
