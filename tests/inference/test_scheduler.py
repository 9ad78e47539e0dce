"""Decoding in slots gives the tokens, logprobs and routes that the model gives for each prompt alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollway.inference.embedded.scheduler import (
    GenerationRequest,
    Scheduler,
    TokenSequence,
    draw,
)
from rollway.inference.embedded.slots import SlotModel
from rollway.model.load import load_model
from rollway.model.routers import capture, find_routers


@pytest.fixture(scope="module")
def model(tiny_moe: Path) -> Any:
    torch.set_num_threads(1)
    return load_model(str(tiny_moe)).eval()


def make_request(request_id: int, prompt: list[int], **changes: Any) -> GenerationRequest:
    defaults: dict[str, Any] = {
        "max_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop_ids": frozenset(),
        "routes_start": 0,
        "seed": request_id,
    }
    return GenerationRequest(id=request_id, prompt=prompt, **{**defaults, **changes})


def finish(scheduler: Scheduler) -> dict[int, TokenSequence]:
    """Decode until all requests are finished, and return their sequences by request id."""
    finished: dict[int, TokenSequence] = {}
    while scheduler.has_work:
        finished.update({sequence.request.id: sequence for sequence in scheduler.run_pass()})
    return finished


def random_prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 250, rng.integers(2, 30)).tolist() for _ in range(count)]


def run_plain_pass(model: Any, sequence: TokenSequence) -> tuple[list[float], Any]:
    """Return logprobs and routes of a finished sequence from one plain forward pass."""
    ids = torch.tensor([sequence.request.prompt + sequence.tokens])
    with torch.inference_mode(), capture(find_routers(model)) as chosen:
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits / sequence.request.temperature, -1)
    start = len(sequence.request.prompt)
    drawn = [float(logprobs[start + i - 1, token]) for i, token in enumerate(sequence.tokens)]
    return drawn, torch.stack(chosen, 1).numpy()


def test_many_requests_decode_like_the_plain_model(model: Any) -> None:
    """There are more requests than slots. Joining, leaving and moving between slots changes nothing."""
    scheduler = Scheduler(SlotModel(model, num_slots=5, max_context=64), seed=0)
    for request_id, prompt in enumerate(random_prompts(17)):
        scheduler.add(
            make_request(
                request_id,
                prompt,
                max_tokens=1 + request_id % 7,
                temperature=0.5 + 0.1 * request_id,
            )
        )
    done = finish(scheduler)
    assert len(done) == 17
    for sequence in done.values():
        assert sequence.finish_reason == "length"
        assert len(sequence.tokens) == sequence.request.max_tokens
        logprobs, expected_routes = run_plain_pass(model, sequence)
        np.testing.assert_allclose(sequence.logprobs, logprobs, atol=1e-4)
        routes = sequence.routes()
        assert routes is not None
        assert routes.dtype == np.uint8
        np.testing.assert_array_equal(routes, expected_routes[:-1])


def test_a_seeded_reply_does_not_depend_on_other_requests(model: Any) -> None:
    alone: dict[int, list[int]] = {}
    for request_id, prompt in enumerate(random_prompts(6)):
        scheduler = Scheduler(SlotModel(model, 1, 64), seed=0)
        scheduler.add(make_request(request_id, prompt))
        alone[request_id] = finish(scheduler)[request_id].tokens
    scheduler = Scheduler(SlotModel(model, 6, 64), seed=9)
    for request_id, prompt in enumerate(random_prompts(6)):
        scheduler.add(make_request(request_id, prompt))
    together = {
        sequence.request.id: sequence.tokens for sequence in finish(scheduler).values()
    }
    assert together == alone


def test_stop_tokens_length_limits_and_routes_start_are_kept(model: Any) -> None:
    scheduler = Scheduler(SlotModel(model, 4, max_context=16), seed=0)
    scheduler.add(make_request(0, [1, 2, 3], stop_ids=frozenset(range(300))))
    scheduler.add(make_request(1, list(range(10)), max_tokens=100))
    scheduler.add(make_request(2, [1, 2, 3, 4], routes_start=2))
    done = finish(scheduler)
    assert (done[0].finish_reason, len(done[0].tokens)) == ("stop", 1)
    assert (done[1].finish_reason, done[1].length) == ("length", 16)
    routes = done[2].routes()
    assert routes is not None
    assert len(routes) == 4 + 6 - 1 - 2


def test_an_aborted_request_frees_its_slot_and_does_not_change_the_others(model: Any) -> None:
    scheduler = Scheduler(SlotModel(model, 3, 64), seed=0)
    for request_id, prompt in enumerate(random_prompts(5)):
        scheduler.add(make_request(request_id, prompt, max_tokens=8))
    for _ in range(3):
        scheduler.run_pass()
    scheduler.abort(0)
    scheduler.abort(4)
    done = finish(scheduler)
    assert sorted(done) == [1, 2, 3]
    for sequence in done.values():
        expected = run_plain_pass(model, sequence)[0]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_a_paused_request_continues_and_each_token_has_its_version(model: Any) -> None:
    scheduler = Scheduler(SlotModel(model, 2, 64), seed=0)
    scheduler.add(make_request(0, [1, 2, 3], max_tokens=4))
    scheduler.run_pass()
    scheduler.run_pass()
    scheduler.paused = True
    assert not scheduler.has_work
    scheduler.version, scheduler.paused = 7, False
    assert finish(scheduler)[0].versions == [0, 0, 7, 7]


def test_drawn_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]]).repeat(4000, 1)
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(make_request(0, [1], temperature=0.8), rng) for _ in range(4000)
    ]
    tokens, logprobs = draw(logits, sequences)
    expected = torch.softmax(logits[0] / 0.8, -1)
    counts = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(counts, expected, atol=0.03)
    assert logprobs[0] == pytest.approx(float(expected[tokens[0]].log()), abs=1e-5)


def test_top_p_excludes_unlikely_tokens_and_temperature_0_is_greedy() -> None:
    logits = torch.tensor([[3.0, 2.0, -5.0]]).repeat(200, 1)
    rng = np.random.default_rng(0)
    tokens, logprobs = draw(
        logits, [TokenSequence(make_request(0, [1], top_p=0.5), rng) for _ in range(200)]
    )
    assert set(tokens) == {0}
    assert logprobs[0] == pytest.approx(0.0, abs=1e-6)
    tokens, _ = draw(
        logits,
        [TokenSequence(make_request(0, [1], temperature=0.0), rng) for _ in range(200)],
    )
    assert set(tokens) == {0}
