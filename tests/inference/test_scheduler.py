"""Decoding in slots gives what the model gives alone: tokens, logprobs, routes, in any company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollway.inference.embedded.scheduler import GenerationRequest, Scheduler, TokenSequence, draw
from rollway.inference.embedded.slots import SlotModel
from rollway.model.load import load_model
from rollway.model.routers import capture, find_routers


@pytest.fixture(scope="module")
def model(tiny_moe: Path) -> Any:
    torch.set_num_threads(1)
    return load_model(str(tiny_moe)).eval()


def ask(id: int, prompt: list[int], **changes: Any) -> GenerationRequest:
    defaults: dict[str, Any] = {
        "max_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop_ids": frozenset(),
        "routes_start": 0,
        "seed": id,
    }
    return GenerationRequest(id=id, prompt=prompt, **{**defaults, **changes})


def finish(scheduler: Scheduler) -> dict[int, TokenSequence]:
    done: dict[int, TokenSequence] = {}
    while scheduler.has_work:
        done.update({one.ask.id: one for one in scheduler.step()})
    return done


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 250, rng.integers(2, 30)).tolist() for _ in range(count)]


def by_the_book(model: Any, one: TokenSequence) -> tuple[list[float], Any]:
    """Logprobs and routes of a finished sequence from one plain forward pass."""
    ids = torch.tensor([one.ask.prompt + one.tokens])
    with torch.inference_mode(), capture(find_routers(model)) as chosen:
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / one.ask.temperature, -1)
    start = len(one.ask.prompt)
    drawn = [float(logprobs[start + i - 1, token]) for i, token in enumerate(one.tokens)]
    return drawn, torch.stack(chosen, 1).numpy()


def test_a_crowd_decodes_like_the_plain_model(model: Any) -> None:
    """More requests than slots, of all lengths: joining, leaving and moving changes nothing."""
    scheduler = Scheduler(SlotModel(model, num_slots=5, max_context=64), seed=0)
    for id, prompt in enumerate(prompts(17)):
        scheduler.add(ask(id, prompt, max_tokens=1 + id % 7, temperature=0.5 + 0.1 * id))
    done = finish(scheduler)
    assert len(done) == 17
    for one in done.values():
        assert one.finish_reason == "length"
        assert len(one.tokens) == one.ask.max_tokens
        logprobs, routes = by_the_book(model, one)
        np.testing.assert_allclose(one.logprobs, logprobs, atol=1e-4)
        got = one.routes()
        assert got is not None
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, routes[:-1])


def test_company_does_not_change_a_seeded_reply(model: Any) -> None:
    alone: dict[int, list[int]] = {}
    for id, prompt in enumerate(prompts(6)):
        scheduler = Scheduler(SlotModel(model, 1, 64), seed=0)
        scheduler.add(ask(id, prompt))
        alone[id] = finish(scheduler)[id].tokens
    scheduler = Scheduler(SlotModel(model, 6, 64), seed=9)
    for id, prompt in enumerate(prompts(6)):
        scheduler.add(ask(id, prompt))
    assert {id: one.tokens for id, one in finish(scheduler).items()} == alone


def test_stops_limits_and_routes_start(model: Any) -> None:
    scheduler = Scheduler(SlotModel(model, 4, max_context=16), seed=0)
    scheduler.add(ask(0, [1, 2, 3], stop_ids=frozenset(range(300))))
    scheduler.add(ask(1, list(range(10)), max_tokens=100))
    scheduler.add(ask(2, [1, 2, 3, 4], routes_start=2))
    done = finish(scheduler)
    assert (done[0].finish_reason, len(done[0].tokens)) == ("stop", 1)
    assert (done[1].finish_reason, done[1].length) == ("length", 16)
    routes = done[2].routes()
    assert routes is not None
    assert len(routes) == 4 + 6 - 1 - 2


def test_abort_frees_the_slot_and_leaves_the_others_alone(model: Any) -> None:
    scheduler = Scheduler(SlotModel(model, 3, 64), seed=0)
    for id, prompt in enumerate(prompts(5)):
        scheduler.add(ask(id, prompt, max_tokens=8))
    for _ in range(3):
        scheduler.step()
    scheduler.abort(0)
    scheduler.abort(4)
    done = finish(scheduler)
    assert sorted(done) == [1, 2, 3]
    for one in done.values():
        np.testing.assert_allclose(one.logprobs, by_the_book(model, one)[0], atol=1e-4)


def test_pause_freezes_and_versions_mark_tokens(model: Any) -> None:
    scheduler = Scheduler(SlotModel(model, 2, 64), seed=0)
    scheduler.add(ask(0, [1, 2, 3], max_tokens=4))
    scheduler.step()
    scheduler.step()
    scheduler.paused = True
    assert not scheduler.has_work
    scheduler.version, scheduler.paused = 7, False
    assert finish(scheduler)[0].versions == [0, 0, 7, 7]


def test_drawing_follows_the_distribution() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]]).repeat(4000, 1)
    rng = np.random.default_rng(0)
    crowd = [TokenSequence(ask(0, [1], temperature=0.8), rng) for _ in range(4000)]
    tokens, logprobs = draw(logits, crowd)
    expected = torch.softmax(logits[0] / 0.8, -1)
    counts = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(counts, expected, atol=0.03)
    assert logprobs[0] == pytest.approx(float(expected[tokens[0]].log()), abs=1e-5)


def test_top_p_cuts_the_tail_and_zero_temperature_is_greedy() -> None:
    logits = torch.tensor([[3.0, 2.0, -5.0]]).repeat(200, 1)
    rng = np.random.default_rng(0)
    tokens, logprobs = draw(logits, [TokenSequence(ask(0, [1], top_p=0.5), rng) for _ in range(200)])
    assert set(tokens) == {0}
    assert logprobs[0] == pytest.approx(0.0, abs=1e-6)
    tokens, _ = draw(logits, [TokenSequence(ask(0, [1], temperature=0.0), rng) for _ in range(200)])
    assert set(tokens) == {0}
