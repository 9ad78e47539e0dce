"""What other clients do, and what evaluations ask, with a model without experts."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

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
