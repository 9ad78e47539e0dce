"""`rollway train` as a user runs it: whole processes, signals, and what is left behind."""

import json
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from tests.doubles.command import Rollway
from tests.doubles.declared import declarations_of
from tests.doubles.stand_ins import CopyingTrainer
from tests.doubles.workspace import DEADLINE_S, Workspace

from rollway.observe.declared import DECLARED
from rollway.payload.reuse import SPARES

pytestmark = [pytest.mark.system]

ENDLESS = ("--set", "max_steps=500")
"""For runs that are ended from outside."""
TWO_WORKERS = ("--set", "env.0.server.workers=2")
EVALS = ("--set", "eval.every=2", "--set", "eval.num_tasks=2")
PROCESSES = ("orchestrator", "envs.router", "envs.w0", "envs.w1", "engine", "trainer")
PHASES = ("wait_rollouts", "hold", "credit", "ship", "open", "train", "publish")
RARE = {
    "metric/{metric}/mean", "stalls/{process}/count", "stalls/{process}/seconds",
    "slow_calls/{process}/count", "slow_calls/{process}/seconds", "process_in_flight/{process}",
    "pool/{env}/{pool}",
}  # fmt: skip
"""Metrics that a run does not write if it goes well and its environment has none."""
NOT_METRICS = {"stalls"}
"""Other keys of a line of metrics."""


def test_a_whole_run_that_is_interrupted_and_resumed(
    work: Workspace, rollway: Rollway
) -> None:
    """Two workers, a real engine, a real trainer, evaluations, metrics over HTTP: Ctrl-C ends them all,
    and --resume takes the run to its end."""
    port = free_port()
    options = (*TWO_WORKERS, *EVALS, "--set", f"metrics.prometheus.port={port}")
    spare = work.run / "payload" / SPARES / "one.0-0000.seg"
    with work.training(*options, *ENDLESS) as process:
        work.wait_for_step(process, 2)
        check_scraped(port)
        while not (work.run / "checkpoints" / "step_2").exists():  # written beside training
            assert process.poll() is None
            time.sleep(0.05)
        spare.parent.mkdir(exist_ok=True)
        spare.touch()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
    assert not spare.exists(), "a segment that nothing is written into takes no space"
    assert "--resume" in err
    assert "Traceback" not in err
    work.assert_nothing_is_left()
    again = rollway("train", work.file)
    assert again.code == 1
    assert again.err.count("\n") == 1
    assert "--resume continues it, --clean starts over" in again.err
    last = work.metrics()[-1]["step"] + 4
    to_the_end = ("--resume", *options, "--set", f"max_steps={last}")
    done = work.train(*to_the_end)
    assert done.returncode == 0, done.stderr
    work.assert_nothing_is_left()
    check_console(done.stdout, last)
    check_run_directory(work, last)
    check_metrics(work)
    assert "Nothing to do" in rollway("train", work.file, *to_the_end).out
    assert (
        f"The run is complete: its {last} steps were trained at"
        in rollway("why", work.run).out
    )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def check_scraped(port: int) -> None:
    """Each process reports within seconds, so ask until all of them are there."""
    names = []
    for name in (*PROCESSES, "launcher"):
        names.append(f'rollway_event_loop_lag_seconds{{process="{name}",stat="p99"}}')
        names.append(f'rollway_rss_bytes{{process="{name}"}}')
    names += ["rollway_step ", "rollway_in_flight ", "rollway_payload_live_bytes ",
              "rollway_time_train_seconds "]  # fmt: skip
    deadline = time.monotonic() + DEADLINE_S
    missing = names
    while missing and time.monotonic() < deadline:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        missing = [name for name in names if name not in text]
        time.sleep(0.1)
    assert not missing
    step = re.search(r"^rollway_step (\S+)$", text, re.MULTILINE)
    assert step is not None
    assert float(step[1]) >= 2


def check_console(text: str, last: int) -> None:
    for step in range(last - 2, last + 1):
        (line,) = [
            line for line in text.splitlines() if line.startswith(f"Step {step}/{last} ")
        ]
        for part in (
            "Time:",
            "Reward:",
            "Throughput:",
            "Off-Policy:",
            "In Flight:",
            "Lag p99/max ms:",
        ):
            assert part in line
        assert "orchestrator" in line
    (summary,) = [
        line for line in text.splitlines() if line.startswith("Lag p99/max ms, whole run")
    ]
    for process in PROCESSES:
        assert process in summary


def check_run_directory(work: Workspace, last: int) -> None:
    run = work.run
    for name in ("config.toml", "run.db", "metrics.jsonl", "logs", "payload", "batches", "rollouts",
                 "weights", "checkpoints"):  # fmt: skip
        assert (run / name).exists(), name
    assert list((run / "payload").iterdir()) == [], "all payload was released"
    checkpoints = {path.name for path in (run / "checkpoints").iterdir()}
    kept = sorted({*range(2, last + 1, 2), last})[-3:]
    assert checkpoints == {f"step_{step}" for step in kept}
    assert (run / "weights" / f"step_{last}" / "STABLE").exists()
    # an evaluation during which the run was interrupted runs again, with other rollouts
    settled = "SELECT DISTINCT num_settled FROM rollouts WHERE error IS NOT 'the run was interrupted'"
    assert work.ledger(settled) == [(1,)]
    assert work.ledger("SELECT count(*) FROM rollouts WHERE outcome IS NULL") == [(0,)]
    assert work.ledger("SELECT count(*) FROM steps") == [(last,)]
    trained = work.ledger(
        "SELECT DISTINCT step FROM rollouts WHERE step IS NOT NULL ORDER BY step"
    )
    assert trained == [(step,) for step in range(1, last + 1)]
    for step in range(1, last + 1):
        manifest = json.loads(
            (run / "batches" / f"step_{step}" / "manifest.json").read_text()
        )
        assert len({row["rollout_id"] for row in manifest["rows"]}) >= 16
        saved = (run / "rollouts" / f"step_{step}" / "train.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in saved]
        assert {"messages", "reward", "advantage", "timing"} <= set(rollouts[0])
        trained_ids = {
            rollout["rollout"] for rollout in rollouts if rollout["fate"] == "trained"
        }
        assert trained_ids == {row["rollout_id"] for row in manifest["rows"]}
        queued = [
            line["timing"]["queue_s"] for line in rollouts if line["outcome"] == "scored"
        ]
        assert queued
        assert all(wait >= 0 for wait in queued)


def check_metrics(work: Workspace) -> None:
    """All metrics are declared, and all that are declared are there."""
    lines = work.metrics()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), (
        "each step once"
    )
    evals = [json.loads(line) for line in (work.run / "evals.jsonl").read_text().splitlines()]
    names = {name for line in [*lines, *evals] for name in line} - NOT_METRICS
    declared = {name: declarations_of(name) for name in names}
    assert not [name for name, metrics in declared.items() if len(metrics) != 1]
    unseen = set(DECLARED) - {metric for metrics in declared.values() for metric in metrics}
    assert {metric.name for metric in unseen} <= RARE
    assert all(line["off_policy/max"] <= 1 for line in lines)
    assert lines[0]["mismatch_kl"] < 1e-5, "fresh rows: engine and trainer agree"
    for line in (
        *lines[:2],
        *lines[-2:],
    ):  # those between may lack what the interrupted run knew
        assert all(line[f"time/{phase}"] >= 0 for phase in PHASES)
        assert line["num_turns/mean"] == 2
        stops = [value for name, value in line.items() if name.startswith("stop/")]
        assert sum(stops) == pytest.approx(1.0)
        assert line["env/envs/reward/mean"] == pytest.approx(line["reward/all/mean"])
        assert line["timing/queue/max"] >= line["timing/queue/mean"] >= 0


def test_a_run_without_a_shared_file_system(light: Workspace) -> None:
    """Workers send their payload as frames; the orchestrator writes it, through to the disk."""
    done = light.train("--set", "payload.store=frames", "--set", "payload.durability=host")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in light.metrics()] == [1, 2, 3, 4]
    segments = light.ledger("SELECT DISTINCT segment FROM rollouts WHERE step IS NOT NULL")
    assert segments == [("envs.in.0-0000.seg",)]
    assert not list((light.run / "payload").iterdir())
    light.assert_nothing_is_left()


def test_a_killed_env_worker_costs_nothing_but_time(
    light: Workspace, trainer: CopyingTrainer
) -> None:
    trainer.hold_at(3)
    with light.training("--set", "max_steps=8", *TWO_WORKERS) as process:
        light.find("rollway.envserver.worker.worker:main")[0].kill()
        light.wait_for_line(process, "was killed by SIGKILL: .* of its rollouts run again")
        trainer.release()
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
    assert "Step 8/8" in out
    assert light.ledger("SELECT DISTINCT num_settled FROM rollouts") == [(1,)]
    light.assert_nothing_is_left()


def test_a_part_stopped_from_outside_ends_the_run(light: Workspace) -> None:
    with light.training(*ENDLESS) as process:
        (victim,) = light.find("rollway.envserver.router.router:main")
        victim.terminate()
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
    assert "router" in err
    assert "was stopped from outside" in err
    light.assert_nothing_is_left(was_killed=True)


@pytest.mark.long
def test_a_dense_model_trains_and_its_run_asks_for_no_routes(
    tmp_path: Path, tiny_dense: Path
) -> None:
    work = Workspace(tmp_path, tiny_dense)
    refused = work.train("--set", "engine.routes=true")
    assert refused.returncode == 1
    assert "(family 'qwen3') has no experts: remove the key" in refused.stderr
    options = (
        "--set",
        "trainer.dtype=bfloat16",
        "--set",
        "trainer.activation_checkpointing=true",
    )
    done = work.train("--set", "max_steps=3", *options)
    assert done.returncode == 0, done.stderr
    work.assert_nothing_is_left()
    assert all(line["rows/left_out"] == 0 for line in work.metrics())
    assert work.metrics()[0]["mismatch_kl"] < 0.01
    config = json.loads((work.run / "weights" / "step_3" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


@pytest.mark.long
def test_a_killed_rank_is_started_again_and_the_run_goes_on(trains: Workspace) -> None:
    with trains.training(*ENDLESS) as process:
        (victim,) = trains.find("rollway.trainer.rank:serve_rank")
        victim.kill()
        (line,) = trains.wait_for_line(process, "the trainer starts again")[-1:]
        assert f"trainer-rank (pid {victim.pid}) was killed by SIGKILL" in line
        last = trains.metrics()[-1]["step"] + 3
        trains.wait_for_step(process, last)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
    trains.assert_nothing_is_left(was_killed=True)
    lines = trains.metrics()
    assert [line["step"] for line in lines[:last]] == list(range(1, last + 1))
    assert all(line["off_policy/max"] <= 1 for line in lines)


def test_a_killed_orchestrator_ends_the_run_with_the_reason(light: Workspace) -> None:
    with light.training(*ENDLESS) as process:
        check_killed(light, process, "rollway.orchestrator.shell.main:main")


def test_an_orchestrator_that_is_stopped_gives_spare_space_back(light: Workspace) -> None:
    spare = light.run / "payload" / SPARES / "one.0-0000.seg"
    with light.training(*ENDLESS) as process:
        spare.parent.mkdir(exist_ok=True)
        spare.touch()
        (orchestrator,) = light.find("rollway.orchestrator.shell.main:main")
        orchestrator.terminate()
        process.communicate(timeout=DEADLINE_S)
    assert not spare.exists()


def check_killed(work: Workspace, process: "subprocess.Popen[str]", entry: str) -> None:
    """Kill the part with this entry: the run ends and names it."""
    (victim,) = work.find(entry)
    victim.kill()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert entry.split(".")[1] in err
    assert "SIGKILL" in err or "died" in err
    assert "Traceback" not in err
    work.assert_nothing_is_left(was_killed=True)


def test_sigterm_ends_a_run_in_which_no_other_can_train(
    light: Workspace, trainer: CopyingTrainer, rollway: Rollway
) -> None:
    trainer.hold_at(2)
    with light.training(*ENDLESS) as process:
        for flag in ("--resume", "--clean"):
            second = rollway("train", light.file, flag)
            assert second.code == 1
            assert second.err.startswith("rollway: another process trains in ")
        process.terminate()
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 143
    assert "Traceback" not in err
    light.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("trainer.leaning_rate=1", "unknown key 'trainer.leaning_rate'"),
        ("model.path=/nowhere", "no model folder '/nowhere'"),
        (
            "env.0.id=revers-text",
            "no environment 'revers-text'; did you mean 'reverse-text'?",
        ),
        ("env.0.id=my_env.py", "no environment file at "),
    ],
)
def test_mistakes_that_can_be_seen_are_said_before_anything_is_written(
    work: Workspace, rollway: Rollway, mistake: str, said: str
) -> None:
    failed = rollway("train", work.file, "--set", mistake)
    assert failed.code == 1
    assert said in failed.err
    assert failed.err.count("\n") == 1, failed.err
    assert not work.run.exists()


def test_mistakes_that_a_part_finds_are_one_line(work: Workspace) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        mistakes = {
            f"engine.embedded.port={port}": f"'engine.embedded.port' = {port} cannot be bound",
            "engine.external.url=http://127.0.0.1:9": "nothing listens at http://127.0.0.1:9",
        }
        for mistake, said in mistakes.items():
            failed = work.train("--clean", "--set", mistake, "--set", "external_trainer={}")
            assert failed.returncode == 1, (mistake, failed.stdout)
            assert said in failed.stderr
            assert failed.stderr.count("\n") == 1, failed.stderr
            assert failed.stdout == "" or "Traceback" not in failed.stdout
            assert not work.processes()


def test_a_dry_run_prints_the_plan_and_starts_nothing(
    work: Workspace, rollway: Rollway
) -> None:
    shown = rollway("train", work.file, "--dry-run", "--set", "trainer.lr=0.5")
    assert shown.code == 0
    assert "lr = 0.5" in shown.out
    assert "[plan]" in shown.out
    assert not work.run.exists()
