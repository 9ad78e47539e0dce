"""Starts vLLM as a user would, with flags of one's own, and runs of rollway against it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PROGRAM = Path(os.environ.get("ROLLWAY_VLLM", ROOT / ".venv-vllm" / "bin" / "vllm"))
COIN = Path(__file__).parent / "coin.py"
ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT / "src"),
}
PLUGIN = ("--worker-extension-cls", "rollway.vllm.WorkerExtension")
MIDDLEWARE = ("--middleware", "rollway.vllm.Middleware")
ROUTES = ("--enable-return-routed-experts",)
EAGER = ("--enforce-eager",)
SAMPLED = ("--logprobs-mode", "processed_logprobs")
FLOAT32 = ("--dtype", "float32")
RIGHT = (*PLUGIN, *MIDDLEWARE, *EAGER, *SAMPLED, *FLOAT32)
START_S = 180.0


class Server(NamedTuple):
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def fetch(self, path: str, body: object = None, **headers: str) -> bytes:
        """Send a request, a POST if it has a body, and return the answer."""
        data = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"{self.url}{path}", data, kind)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def is_healthy(self) -> bool:
        try:
            self.fetch("/health")
        except OSError:
            return False
        return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def serving(
    model: Path, log: Path, *flags: str, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """Run vLLM for the length of the block."""
    port = free_port()
    argv = [str(PROGRAM), "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
            "--served-model-name", "policy", *flags]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, stdout=output, stderr=output, env={**os.environ, **ENV, **(env or {})},
            start_new_session=True,
        )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        until_s = time.monotonic() + START_S
        while not server.is_healthy():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until_s, f"vLLM does not start: {log}"
            time.sleep(0.5)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


RUN_FILE = """
name = "run"
output_dir = "{folder}"
max_steps = {steps}
[model]
path = "{model}"
renderer = "qwen3"
template = {{ enable_thinking = false }}
[[env]]
id = "{coin}"
server = {{ workers = 1, concurrency = 32 }}
[sampling]
max_tokens = 8
[engine]
{engine}
[orchestrator]
batch_size = 16
group_size = 4
max_in_flight = 32
[trainer]
lr = 3e-3
micro_batch_tokens = 1024
"""


class Run(NamedTuple):
    code: int
    text: str
    """All that the run printed."""
    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def command(
    folder: Path, model: Path, engine: str, *settings: str, steps: int = 2
) -> list[str]:
    """Write a run file and return the command that trains on it."""
    file = folder / "run.toml"
    text = RUN_FILE.format(folder=folder, model=model, coin=COIN, engine=engine, steps=steps)
    file.write_text(text)
    overrides = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "rollway", "train", str(file), "--clean", *overrides]


def train(folder: Path, model: Path, engine: str, *settings: str, steps: int = 2) -> Run:
    """Train to the end and return what happened."""
    argv = command(folder, model, engine, *settings, steps=steps)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    return Run(done.returncode, done.stdout + done.stderr, folder / "run")


def external(server: Server, model: str = "policy") -> str:
    return f'external = {{ url = "{server.url}", model = "{model}" }}'
