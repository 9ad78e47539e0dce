"""Other ways for batches to reach a trainer: a socket, frames, several ranks, a trainer of one's own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.doubles.workspace import DEADLINE_S, Workspace

pytestmark = [pytest.mark.system]

ZMQ = ("--set", "transport.zmq={}")


def trained_once(work: Workspace, last: int) -> None:
    """Every step is there once, and no rollout trained twice."""
    assert [line["step"] for line in work.metrics()] == list(range(1, last + 1))
    assert work.ledger("SELECT DISTINCT num_settled FROM rollouts") == [(1,)]
    steps = work.ledger(
        "SELECT DISTINCT step FROM rollouts WHERE step IS NOT NULL ORDER BY step"
    )
    assert steps == [(step,) for step in range(1, last + 1)]


@pytest.mark.long
def test_a_run_over_a_socket_with_two_ranks(trains: Workspace) -> None:
    done = trains.train(*ZMQ, "--set", "trainer.ranks=2")
    assert done.returncode == 0, done.stderr
    trained_once(trains, 4)
    assert not list((trains.run / "payload").iterdir())
    assert not (trains.run / "landing").exists(), "the trainer opened the run's own segments"
    trains.assert_nothing_is_left()


@pytest.mark.long
def test_a_killed_trainer_ends_the_run_and_resume_goes_on(trains: Workspace) -> None:
    options = (*ZMQ, "--set", "transport.zmq.payload=frames")
    with trains.training(*options, "--set", "max_steps=500") as process:
        (victim,) = trains.find("rollway.trainer.front:main")
        victim.kill()
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
    assert "trainer" in err
    assert "SIGKILL" in err
    assert "Traceback" not in err
    last = max(line["step"] for line in trains.metrics()) + 3
    resumed = trains.train("--resume", *options, "--set", f"max_steps={last}")
    assert resumed.returncode == 0, resumed.stderr
    trained_once(trains, last)
    assert not list((trains.run / "payload").iterdir())
    assert not list((trains.run / "landing").iterdir()), "what was trained is removed"
    trains.assert_nothing_is_left()


OWN_TRAINER = """
import asyncio, pathlib, shutil, sys
from rollway.transport import Published, open_batches

async def main(where, model, folder, dies_at):
    async with open_batches(where, landing=f"{folder}/landing" if "tcp:" in where else None) as batches:
        async for batch in batches:
            manifest, reader = batch.manifest(), batch.reader()
            tokens = sum(len(reader.row(row)["token_ids"]) for row in manifest.rows)
            assert tokens == manifest.num_tokens > 0
            assert len(manifest.ranks) == 3
            if batch.step == dies_at:
                sys.exit(3)
            weights = pathlib.Path(folder) / f"v{batch.version}"
            shutil.copytree(model, weights)
            await batches.publish(Published(batch.version, str(weights), {"loss": float(batch.step)}))
            print("published", batch.version, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
"""


def run_with(
    own: Path, work: Workspace, model: Path, options: list[str], *deaths: int
) -> list[str]:
    """A run whose trainer is the script `own`: it exits at each step of `deaths` in turn and is started
    again, then lives to the end. What its last life said."""
    command = work.command("--set", "external_trainer={}", *options)
    with subprocess.Popen(
        command,
        cwd=work.folder,
        env=work.env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "Waiting for your trainer" in line)
            where = re.search(r"open_batches\('(.*)'\)", line)
            assert where is not None
            for dies_at in (*deaths, 0):
                command = [
                    sys.executable,
                    str(own),
                    where[1],
                    str(model),
                    str(own.parent),
                    str(dies_at),
                ]
                done = subprocess.run(
                    command, env=work.env, capture_output=True, text=True, timeout=DEADLINE_S
                )
                assert done.returncode == (3 if dies_at else 0), done.stderr
            _, err = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, err
        finally:
            process.kill()
    return done.stdout.split()


def test_a_trainer_of_ones_own(
    trains: Workspace, tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It crashes in the middle and is started again. Its weights lie outside the run directory, and the
    run goes on from there when it is resumed."""
    own = tmp_path_factory.mktemp("own") / "own.py"
    own.write_text(OWN_TRAINER)
    options = ["--set", "transport.zmq={}", "--set", "external_trainer.ranks=3"]
    said = run_with(own, trains, tiny_moe, options, 3)
    assert said == ["published", "3", "published", "4"]
    trained_once(trains, 4)
    said = run_with(own, trains, tiny_moe, ["--resume", *options, "--set", "max_steps=5"])
    assert said == ["published", "5"]
    trained_once(trains, 5)
    assert [line["loss"] for line in trains.metrics()] == [1.0, 2.0, 3.0, 4.0, 5.0]
