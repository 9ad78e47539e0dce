"""Runs in which an engine gives wrong replies, or payload is wrong though its checksum is right."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from tests.doubles.proxy import Choice, Poison, poisoning_proxy, read_routes, write_routes
from tests.doubles.workspace import Workspace
from tests.system.test_engines import wait_until

from rollway.payload.blob import OPENING, Columns, parse

pytestmark = [pytest.mark.system]

NUM_EXPERTS = 8


def set_first(key: str, value: Any) -> Poison:
    def poison(choice: Choice) -> None:
        choice[key][0] = value

    return poison


def set_logprob(value: float) -> Poison:
    def poison(choice: Choice) -> None:
        choice["logprobs"]["token_logprobs"][0] = value

    return poison


def change_routes(change: Any) -> Poison:
    def poison(choice: Choice) -> None:
        write_routes(choice, change(read_routes(choice)))

    return poison


def with_expert(expert: int) -> Any:
    def change(routes: Any) -> Any:
        routes[-1, -1, -1] = expert
        return routes

    return change


def twice(routes: Any) -> Any:
    routes[-1, -1] = 3
    return routes


def aborted(choice: Choice) -> None:
    choice["finish_reason"] = "abort"


POISONS: dict[str, tuple[Poison, str]] = {
    "id": (set_first("token_ids", 1 << 20), "the vocabulary of 'model.path' has"),
    "negative id": (set_first("token_ids", -5), "token ids from -5"),
    "expert": (change_routes(with_expert(NUM_EXPERTS)), "name expert 8, but"),
    "topk": (change_routes(lambda routes: routes[..., :1]), r"3 layers × 1 experts, but"),
    "layers": (change_routes(lambda routes: routes[:, :2]), r"2 layers × 2 experts, but"),
    "dtype": (change_routes(lambda routes: routes.astype(np.uint16)), "uint16"),
    "transposed": (change_routes(lambda routes: routes.swapaxes(0, 1)), "expected"),
    "zeros": (change_routes(np.zeros_like), "are all zero"),
    "twice": (change_routes(twice), "tokens to one expert twice"),
    "minus infinity": (set_logprob(-9999.0), "stands for minus infinity"),
    "above 0": (set_logprob(0.5), "a logprob is at most 0"),
    "negative version": (set_first("token_versions", -1), "versions -1 to"),
    "future version": (set_first("token_versions", 999), "to 999 drew its reply"),
    "aborted": (aborted, "finish_reason 'abort'"),
}  # fmt: skip


def test_wrong_replies_are_named_counted_and_never_trained(
    tmp_path: Path, tiny_moe: Path, engine_url: str
) -> None:
    poisons = {name: poison for name, (poison, _) in POISONS.items()}
    with poisoning_proxy(engine_url, poisons) as proxy:
        work = Workspace(tmp_path, tiny_moe, engines=[proxy.url])
        text = work.file.read_text().replace("routes = false", "")
        work.file.write_text(text)
        done = work.train("--set", "max_steps=12")
    assert done.returncode == 0, done.stderr
    failures = work.ledger("SELECT boundary, error FROM rollouts WHERE outcome = 'failed'")
    assert {boundary for boundary, _ in failures} == {"engine"}
    for name, (_, message) in POISONS.items():
        assert proxy.used[name], f"{name} was never given"
        assert any(re.search(message, error) for _, error in failures), name
    assert sum(line.get("errors/engine", 0) for line in work.metrics()) > 0
    assert all(line["rows/left_out"] == 0 for line in work.metrics())
    assert abs(work.metrics()[0]["mismatch_kl"]) < 1e-3, "what trained is what the model drew"


def poison_blob(
    segment: Path, ref: dict[str, Any], change: Callable[[Columns], None]
) -> None:
    """Change the columns of a blob where they lie, and make its checksum right again."""
    with segment.open("r+b") as file:
        file.seek(ref["offset"])
        blob = bytearray(file.read(ref["length"]))
        change(parse(memoryview(blob)))
        start = 8 + int.from_bytes(blob[:8], "little")
        digits = 8 + len(OPENING)
        blob[digits : digits + 8] = b"%08x" % crc32c(bytes(blob[start:]))
        file.seek(ref["offset"])
        file.write(blob)


def beyond_vocabulary(columns: Columns) -> None:
    columns["row0.token_ids"][1] = 1 << 20


def beyond_experts(columns: Columns) -> None:
    columns["row0.routes"][1] = 200


def minus_infinity(columns: Columns) -> None:
    columns["row0.logprobs"][:] = -9999.0


def one_expert_twice(columns: Columns) -> None:
    columns["row0.routes"][2, 1] = 5


CHANGES = (beyond_vocabulary, beyond_experts, minus_infinity, one_expert_twice)


def test_rows_that_are_wrong_behind_the_workers_back_are_left_out(work: Workspace) -> None:
    """The trainer is stopped until a later batch is there, and its rows are changed."""
    options = ("--set", "orchestrator.max_off_policy_steps=4")
    with work.training("--set", "max_steps=500", *options) as process:
        (front,) = work.find("rollway.trainer.front:main")
        front.suspend()
        step = work.metrics()[-1]["step"] + 3
        path = work.run / "batches" / f"step_{step}" / "manifest.json"
        wait_until(path.exists)
        rows = json.loads(path.read_text())["rows"]
        assert len(rows) >= len(CHANGES)
        poisoned = [row for row in rows if row["row"] == 0][: len(CHANGES)]
        for row, change in zip(poisoned, CHANGES, strict=True):
            poison_blob(work.run / "payload" / row["ref"]["segment"], row["ref"], change)
        front.resume()
        lines = work.wait_for_step(process, step + 1)
        process.send_signal(signal.SIGINT)
        process.wait()
    (told,) = [line for line in lines if "trained without" in line]
    assert f"Step {step} trained without " in told
    assert sum(row["rollout_id"] in told for row in poisoned) >= 3
    for reason in ("token ids go from", "name expert 200", "minus infinity", "and 1 more"):
        assert reason in told
    metrics = {line["step"]: line for line in work.metrics()}
    assert metrics[step]["rows/left_out"] == len(CHANGES)
    assert metrics[step + 1]["rows/left_out"] == 0
