"""`rollway serve` as a user runs it: a server of its own, clients with and without keys, signals."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from tests.doubles.command import Rollway
from tests.doubles.engine import engine_double
from tests.doubles.workspace import DEADLINE_S

from rollway.envserver import client as envs
from rollway.errors import CurveKeysError
from rollway.loop.processes.leftovers import MARK
from rollway.payload.reader import SegmentReader
from rollway.payload.writer import SegmentWriter
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.payload import SegmentName
from rollway.records.rollout import Outcome, Scored, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.keys import make_keys, read_client_keys
from rollway.wire.messages import Run

pytestmark = [pytest.mark.system, pytest.mark.anyio]

ENVS = Path(__file__).parents[1] / "doubles" / "envs.py"


@contextmanager
def started(folder: Path, *args: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "rollway", *args]
    with subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def serve(model: Path, url: str, *args: str) -> list[str]:
    return [
        "serve", str(ENVS), "--engine-url", url, "--model", str(model), "--renderer", "qwen3",
        "--template", '{"enable_thinking": false}', "--workers", "1", "--args", '{"kind": "Counting"}',
        *args,
    ]  # fmt: skip


def serving(
    folder: Path, model: Path, url: str, *args: str
) -> AbstractContextManager["subprocess.Popen[str]"]:
    return started(folder, *serve(model, url, *args))


async def line_with(process: "subprocess.Popen[str]", pattern: str) -> "re.Match[str]":
    """The next line that matches; fails with what the server said if it ends before."""
    assert process.stdout is not None
    while line := await asyncio.to_thread(process.stdout.readline):
        if found := re.search(pattern, line):
            return found
    pytest.fail(process.stderr.read() if process.stderr else "")


async def scored(client: envs.EnvClient) -> Outcome:
    task = Task(id="5", prompt="5?", answer="6")
    await client.send(Run(RolloutId("r"), 1, task, Sampling(8), PolicyVersion(0), 0))
    while True:
        match await client.receive():
            case Settled(outcome=outcome):
                return outcome


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_server_on_its_own_from_start_to_signal(
    tmp_path: Path, tiny_moe: Path, how: signal.Signals, code: int
) -> None:
    server, client = make_keys(tmp_path / "keys")
    landing_dir = tmp_path / "here"
    landing_dir.mkdir()
    async with engine_double(tiny_moe, lambda said: "6") as engine:
        args = ("--bind", "tcp://0.0.0.0:*", "--keys", str(server))
        with serving(tmp_path, tiny_moe, engine.url, *args) as process:
            found = await line_with(
                process, r"Serving '.*envs\.py' at tcp://0\.0\.0\.0:(\d+) "
            )
            address = f"tcp://127.0.0.1:{found[1]}"
            with pytest.raises(CurveKeysError, match="requires keys"):
                async with envs.connect(address):
                    pass
            with SegmentWriter(landing_dir, SegmentName("env.in", 0), 1 << 20) as landing:
                keys = read_client_keys(client)
                async with envs.connect(address, landing, keys, must_land=True) as one:
                    outcome = await scored(one)
            assert isinstance(outcome, Scored), outcome
            SegmentReader(landing_dir).verify(outcome.ref)
            if how is signal.SIGINT:  # it comes every ten seconds: once is enough
                told = r"(\d)/1 workers · \d+ rollouts running · .*envs\.w0 "
                assert (await line_with(process, told))[1] == "1"
            (router,) = psutil.Process(process.pid).children()
            assert "/in:" in router.environ()[MARK], "a later command can end what it leaves"
            everyone = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, how)
            assert await asyncio.to_thread(process.wait, DEADLINE_S) == code
            assert not psutil.wait_procs(everyone, timeout=60)[1], "nothing outlives it"
            assert process.stderr is not None
            assert process.stderr.read() == "Stopped.\n"
    logs = tmp_path / "outputs" / "serve" / "envs" / "logs"
    assert {path.name for path in logs.iterdir()} >= {
        "envs.router.log",
        "envs.w0.log",
    }


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--bind", "tcp://0.0.0.0:5555"], "--keys is required; run 'rollway keys new keys'"),
        (["--bind", "0.0.0.0:5555"], "expected tcp://HOST:PORT"),
        (["--bind", "tcp://127.0.0.1:99999"], "expected tcp://HOST:PORT"),
        (["--keys", "none"], "none holds no secret.key; 'rollway keys new keys' makes them"),
        (["--workers", "0"], "--workers 0: expected a whole number, at least 1"),
        (["--args", "[1]"], "--args '[1]' is not a JSON object"),
        (["--payload", "paper"], "--payload paper: invalid enum value 'paper'"),
        (["--payload", "files"], "--payload files needs --payload-dir"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, rollway: Rollway,
    args: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    refused = rollway(*serve(tiny_moe, "http://127.0.0.1:9", *args))
    assert refused.code == 1
    assert said in refused.err
    assert not refused.out
    assert refused.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken_is_named(tmp_path: Path, tiny_moe: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        keys, _ = make_keys(tmp_path / "keys")
        options = ("--bind", bind, "--keys", str(keys))
        with serving(tmp_path, tiny_moe, "http://127.0.0.1:9", *options) as process:
            _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    port = bind.rpartition(":")[2]
    assert errors == (
        f"rollway: '--bind' = {port} cannot be bound at 127.0.0.1: Address already in use; choose "
        "another port\n"
    )


RUN_FILE = """
name = "test"
max_steps = 2
[model]
path = "{model}"
renderer = "qwen3"
template = {{ enable_thinking = false }}
[[env]]
id = "{env}"
external = {{ address = "{address}", keys = "{keys}" }}
[sampling]
max_tokens = 6
[engine]
max_context = 128
external = {{ url = "{engine}", key_var = "ROLLWAY_ENGINE_KEY" }}
[orchestrator]
batch_size = 8
group_size = 4
max_in_flight = 8
[payload]
store = "frames"
"""


@pytest.mark.long
async def test_a_run_trains_on_a_served_environment(
    tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWAY_ENGINE_KEY", "sesame")
    server, client = make_keys(tmp_path / "keys")
    with started(tmp_path, "engine", str(tiny_moe), "--port", "0") as engine:
        url = (await line_with(engine, r"at (http://\S+)/v1"))[1]
        args = (
            "--keys", str(server), "--bind", "tcp://127.0.0.1:*", "--args", '{"kind": "Lengths"}',
            "--key-var", "ROLLWAY_ENGINE_KEY",
        )  # fmt: skip
        with serving(tmp_path, tiny_moe, url, *args) as process:
            address = (await line_with(process, r"at (tcp://127\.0\.0\.1:\d+) "))[1]
            told = RUN_FILE.format(
                model=tiny_moe, env=ENVS, address=address, keys=client, engine=url
            )
            (tmp_path / "run.toml").write_text(told)
            with started(tmp_path, "train", "run.toml") as train:
                said, errors = await asyncio.to_thread(train.communicate, timeout=DEADLINE_S)
            assert train.returncode == 0, errors
            assert "Step 2/2" in said
            assert process.poll() is None, "the server goes on"
    assert not list((tmp_path / "outputs" / "test" / "logs").glob("*router*")), (
        "no server was started"
    )
