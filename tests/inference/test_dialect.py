"""Real replies of vLLM, and replies no engine should give."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollway.errors import EngineError
from rollway.inference.body import BodyCutter
from rollway.inference.dialect import decode_routes, encode_routes, problem, request, turn_from_reply
from rollway.records.turn import Sampling, Turn

DATA = Path(__file__).parent / "data"
PROMPT = np.arange(5, 13, dtype=np.int32)
SAMPLING = Sampling(max_tokens=5, temperature=0.9)


def reply(name: str) -> bytes:
    return (DATA / f"vllm-0.30-{name}.json").read_bytes()


def turn_from(body: bytes, version: int, routes_start: int | None) -> Turn:
    """A whole reply, the way the engine client takes it in."""
    cutter = BodyCutter()
    cutter.feed(body)
    routes = None if cutter.bulk is None else decode_routes(cutter.bulk)
    return turn_from_reply(cutter.rest, routes, PROMPT, SAMPLING, version, routes_start)


def test_a_reply_of_vllm_with_all_routes() -> None:
    turn = turn_from(reply("completions"), 3, routes_start=6)
    assert turn.completion_ids.tolist() == [510, 140, 70, 729, 906]
    assert turn.logprobs[0] == pytest.approx(-6.884614944458008)
    assert turn.versions.tolist() == [3] * 5
    assert turn.finish_reason == "length"
    assert turn.routes is not None
    assert turn.routes.shape == (12, 4, 2)
    assert turn.routes_start == 0, "asked for a part, got everything: noticed"


def test_a_reply_of_vllm_with_new_routes_only() -> None:
    whole = turn_from(reply("completions"), 0, routes_start=0)
    turn = turn_from(reply("completions-delta"), 0, routes_start=6)
    assert turn.routes is not None
    assert whole.routes is not None
    assert turn.routes_start == 6
    assert turn.routes.tobytes() == whole.routes[6:].tobytes()


def test_routes_are_left_alone_when_not_asked_for() -> None:
    assert turn_from(reply("completions"), 0, None).routes is None


def test_requests_ask_for_ids_logprobs_and_new_routes() -> None:
    asked = json.loads(request("m", PROMPT, SAMPLING, [7], routes_start=6))
    assert asked == {
        "model": "m",
        "prompt": PROMPT.tolist(),
        "max_tokens": 5,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "routed_experts_prompt_start": 6,
        "stop_token_ids": [7],
        "ignore_eos": False,
        "seed": None,
    }


def spoiled(**changes: Any) -> bytes:
    tree = json.loads(reply("completions"))
    tree["choices"][0].update(changes)
    return json.dumps(tree).encode()


FLOATS = np.zeros((12, 4, 2), np.float32)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "not a completion"),
        (b'{"choices": []}', "not a completion"),
        (spoiled(token_ids=None), "no token_ids"),
        (spoiled(logprobs=None), "no logprobs"),
        (spoiled(token_ids=[]), "no tokens"),
        (spoiled(routed_experts=None), "--enable-return-routed-experts"),
        (spoiled(routed_experts="%%%"), "cannot be read"),
        (spoiled(routed_experts="AAAA"), "cannot be read"),
        (spoiled(routed_experts=encode_routes(FLOATS)), "float32"),
        (reply("completions").replace(b"-6.884614944458008", b"-1e999"), "not finite|not a completion"),
    ],
)
def test_replies_that_cannot_be_right_are_refused(body: bytes, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        turn_from(body, 0, routes_start=0)


def test_errors_are_told_in_the_engines_words() -> None:
    body = b'{"error": {"message": "prompt too long", "type": "BadRequestError", "code": 400}}'
    assert problem(400, body) == "HTTP 400: prompt too long"
    assert problem(502, b"Bad Gateway") == "HTTP 502: Bad Gateway"
