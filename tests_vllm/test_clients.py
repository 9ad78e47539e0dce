"""What other clients do, and what evaluations ask, with a model without experts."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollway.inference.engines.dialect import make_prompt
from rollway.inference.engines.link import EngineAccess, open_link
from rollway.inference.engines.vllm import Vllm
from rollway.records.turn import Sampling
from rollway.vllm.binary_reply import SAFETENSORS
from tests_vllm.models import write_model
from tests_vllm.servers import COIN, RIGHT, Server, external, serving, train


@pytest.fixture(scope="module")
def greedy_dense(folder: Path) -> Path:
    """A model whose own defaults make sampling greedy."""
    model = write_model(folder / "greedy", experts=0, seed=5)
    settings = {"do_sample": True, "top_k": 1, "temperature": 1.0}
    (model / "generation_config.json").write_text(json.dumps(settings))
    return model


@pytest.fixture(scope="module")
def right_dense(folder: Path, greedy_dense: Path) -> Iterator[Server]:
    with serving(greedy_dense, folder / "right_dense.log", *RIGHT) as server:
        yield server


def evaluate(server: Server, output: Path, url: str, *options: str) -> list[str]:
    """Evaluate one task eight times and return the replies."""
    argv = [
        sys.executable, "-m", "rollway", "eval", str(COIN), "--model", "policy", "-n", "1", "-r", "8",
        "--engine-url", url, "--max-tokens", "16", "--split", "train", "--output", str(output), *options,
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (output / "results.jsonl").read_text().splitlines()
    return [line for line in lines if '"assistant"' in line]


def test_a_chat_evaluation_takes_no_default_of_the_model(
    right_dense: Server, tmp_path: Path
) -> None:
    lines = evaluate(right_dense, tmp_path / "chat", f"{right_dense.url}/v1")
    replies = {json.dumps(json.loads(line)["messages"]) for line in lines}
    assert len(replies) > 4


def test_an_evaluation_by_token_ids(
    right_dense: Server, greedy_dense: Path, tmp_path: Path
) -> None:
    options = ("--tokens", "--tokenizer", str(greedy_dense), "--renderer", "qwen3")
    lines = evaluate(right_dense, tmp_path / "tokens", right_dense.url, *options)
    assert len(lines) == 8


def test_replies_that_another_client_aborts_are_asked_for_again(
    right_dense: Server, greedy_dense: Path, tmp_path: Path
) -> None:
    ended = threading.Event()

    def abort() -> None:
        while not ended.wait(2):
            right_dense.fetch("/abort_requests", {})

    aborting = threading.Thread(target=abort)
    aborting.start()
    try:
        run = train(
            tmp_path, greedy_dense, external(right_dense), "sampling.max_tokens=64", steps=6
        )
    finally:
        ended.set()
        aborting.join()
    assert run.code == 0, run.text
    for metrics in run.metrics:
        ends = {key for key in metrics if key.startswith("stop/")}
        assert ends <= {"stop/stop", "stop/length", "stop/max_turns"}, ends
        assert metrics["errors/engine"] == 0
        assert metrics["rows/left_out"] == 0


NUM_LONG, LENGTH = 16, 1900


def gauge(server: Server, name: str) -> float:
    found = re.search(rf"(?m)^vllm:{name}{{.*}} (\S+)", server.fetch("/metrics").decode())
    assert found, name
    return float(found[1])


@pytest.mark.anyio
@pytest.mark.parametrize("accept", [SAFETENSORS, "application/json"])
async def test_a_request_that_is_cancelled_is_aborted(
    right_dense: Server, accept: str
) -> None:
    prompt = make_prompt(np.arange(5, 45, dtype=np.int32))
    order = json.loads(Vllm().encode_request("policy", prompt, Sampling(LENGTH), [], None))
    body = json.dumps({**order, "ignore_eos": True}).encode()
    before = gauge(right_dense, "generation_tokens_total")

    async def draw() -> None:
        access = EngineAccess(right_dense.url, 60)
        with open_link(access) as link:
            async with link.request("POST", "/v1/completions", body, accept) as reply:
                await reply.read_all()

    drawing = [asyncio.create_task(draw()) for _ in range(NUM_LONG)]
    while gauge(right_dense, "num_requests_running") < NUM_LONG:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    for task in drawing:
        task.cancel()
    await asyncio.gather(*drawing, return_exceptions=True)
    while gauge(right_dense, "num_requests_running"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    drawn = gauge(right_dense, "generation_tokens_total") - before
    assert drawn < NUM_LONG * LENGTH / 2
