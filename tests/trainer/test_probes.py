"""Probes of a real model: texts out of rollouts, their logprobs before and after a change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.test_step import write

from rollway.model.load import load_model
from rollway.model.proof import open_rows
from rollway.model.routers import capture
from rollway.payload.reader import SegmentReader
from rollway.records.ids import PolicyVersion
from rollway.records.turn import Turn
from rollway.trainer.probes import NUM_FIXED, RENEW_EVERY, TEXT_TOKENS, ProbeMaker

pytestmark = pytest.mark.anyio

V0, V1 = PolicyVersion(0), PolicyVersion(1)


def logprobs(model: Any, text: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    scores = torch.log_softmax(logits, -1)
    return [float(scores[place, token]) for place, token in enumerate(text[1:])]


def turn(num_prompt: int, first: int) -> Turn:
    ids = np.arange(first, first + num_prompt + 2, dtype=np.int32)
    drawn = np.zeros(2, np.int32)
    return Turn(ids[:-2], ids[-2:], drawn.astype(np.float32) - 1, drawn, 1.0, "stop")


def change(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.02)


async def test_a_probe_has_what_the_model_gives_before_and_after_a_step(
    tmp_path: Path, tiny_moe: Path
) -> None:
    rows = open_rows(load_model(str(tiny_moe)))
    maker = ProbeMaker(rows, "float32", has_cached_text=True)
    first = maker.make(V0)
    assert len(first.texts) == NUM_FIXED
    assert not any(text.before for text in first.texts)
    turns = [turn(20, 3), turn(5, 40), turn(30, 50)]  # the second is too short for a text
    batch = await write(tmp_path, turns)
    maker.prepare(V0, batch, SegmentReader(tmp_path))
    old = {text: logprobs(rows.model, text) for text in maker._texts}
    change(rows.model)
    probe = maker.make(V1)
    assert len(probe.texts) == NUM_FIXED + 2
    assert probe.texts[NUM_FIXED].token_ids == tuple(range(25 - TEXT_TOKENS, 25))
    for text in probe.texts:
        assert text.before == pytest.approx(old[text.token_ids], abs=1e-5)
        assert text.logprobs == pytest.approx(logprobs(rows.model, text.token_ids), abs=1e-5)
    with capture(rows.routers) as chosen:
        logprobs(rows.model, probe.texts[0].token_ids)
    experts = np.frombuffer(probe.texts[0].routes, np.uint16)
    assert experts.tolist() == torch.stack(chosen, 1).flatten().tolist()
    assert (probe.topk, probe.moe_layers) == (2, (0, 1, 2))
    assert probe.cached is not None
    assert probe.cached.top_logprob < 0


async def test_values_before_a_step_are_right_also_after_a_restart(
    tmp_path: Path, tiny_moe: Path
) -> None:
    """A rank that starts again trains batches without making their probes."""
    rows = open_rows(load_model(str(tiny_moe)))
    maker = ProbeMaker(rows, "float32", has_cached_text=False)
    maker.make(V0)
    change(rows.model)
    maker.prepare(PolicyVersion(5), [], SegmentReader(tmp_path))
    before = logprobs(rows.model, maker._texts[0])
    change(rows.model)
    probe = maker.make(PolicyVersion(6))
    assert probe.texts[0].before == pytest.approx(before, abs=1e-5)
    assert probe.cached is None


async def test_rows_that_the_model_cannot_take_give_no_texts(
    tmp_path: Path, tiny_moe: Path
) -> None:
    rows = open_rows(load_model(str(tiny_moe)))
    maker = ProbeMaker(rows, "float32", has_cached_text=False)
    beyond = await write(tmp_path, [turn(20, 1 << 20)])
    for version in (0, RENEW_EVERY):
        maker.prepare(PolicyVersion(version), beyond, SegmentReader(tmp_path))
        assert len(maker.make(PolicyVersion(version + 1)).texts) == NUM_FIXED
    maker.prepare(PolicyVersion(2 * RENEW_EVERY), beyond, SegmentReader(tmp_path / "gone"))
