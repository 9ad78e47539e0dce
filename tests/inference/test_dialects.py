"""Real replies of vLLM, replies in SGLang's shape, and replies no engine should give."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest

from rollway.errors import EngineError
from rollway.inference.engines.dialect import Dialect, problem
from rollway.inference.engines.prompt import prompt_of
from rollway.inference.engines.sglang import Sglang
from rollway.inference.engines.vllm import Vllm
from rollway.inference.replies.body import BodyBuffer, BodyCutter
from rollway.inference.replies.columns import ReplyColumns
from rollway.inference.replies.routes import RouteShape, WantedRoutes, encode_npy
from rollway.records.turn import Routes, Sampling

DATA = Path(__file__).parent / "data"
PROMPT = prompt_of(np.arange(5, 13, dtype=np.int32))
SAMPLING = Sampling(max_tokens=5, temperature=0.9)
ROUTES = np.arange(12 * 4 * 2).reshape(12, 4, 2)


def reply(name: str) -> bytes:
    return (DATA / f"vllm-0.30-{name}.json").read_bytes()


def taken(dialect: Dialect, body: bytes, start: int = 0) -> tuple[ReplyColumns, Routes | None]:
    """A whole reply, the way the engine client takes it in."""
    wanted = WantedRoutes(start, len(PROMPT), SAMPLING.max_tokens)
    cutter = BodyCutter(BodyBuffer(), lambda key, bulk: dialect.unneeded_chars(key, bulk, wanted))
    cutter.feed(body, 0, len(body))
    drawn = dialect.columns(cutter.rest)
    return drawn, dialect.routes(cutter.bulks, wanted, len(drawn.token_ids))


def test_a_reply_of_vllm_with_all_routes_and_with_new_ones_only() -> None:
    drawn, whole = taken(Vllm(), reply("completions"))
    assert drawn.token_ids.tolist() == [510, 140, 70, 729, 906]
    assert drawn.logprobs[0] == pytest.approx(-6.884614944458008)
    assert drawn.versions is None
    assert drawn.finish_reason == "length"
    assert whole is not None
    assert whole.shape == (12, 4, 2)
    for name in ("completions", "completions-delta"):
        _, new = taken(Vllm(), reply(name), start=6)
        assert new is not None
        assert new.tobytes() == whole[6:].tobytes()


def test_prompt_and_reply_routes_in_fields_of_their_own() -> None:
    tree = json.loads(reply("completions"))
    tree["prompt_routed_experts"] = encode_npy(ROUTES[:8].astype(np.uint8))
    tree["choices"][0]["routed_experts"] = encode_npy(ROUTES[8:].astype(np.uint8))
    _, whole = taken(Vllm(), json.dumps(tree).encode())
    assert np.array_equal(whole, ROUTES)  # type: ignore[arg-type]
    _, new = taken(Vllm(), json.dumps(tree).encode(), start=6)
    assert np.array_equal(new, ROUTES[6:])  # type: ignore[arg-type]
    tree["prompt_routed_experts"] = encode_npy(ROUTES[6:8].astype(np.uint8))
    _, new = taken(Vllm(), json.dumps(tree).encode(), start=6)
    assert np.array_equal(new, ROUTES[6:])  # type: ignore[arg-type]


def test_a_request_to_vllm_says_everything_that_shapes_the_distribution() -> None:
    asked = json.loads(Vllm().request("m", PROMPT, SAMPLING, [7], 6))
    assert asked == {
        "model": "m",
        "prompt": list(range(5, 13)),
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


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "not a completion"),
        (b'{"choices": []}', "not a completion"),
        (b'{"choices": [{"finish_reason": "\x80"}]}', "not a completion.*utf-8"),
        (b'{"usage": ' + b"[" * 100_000, "not a completion"),
        (spoiled(token_ids=None), "no token_ids"),
        (spoiled(logprobs=None), "no logprobs"),
        (spoiled(token_ids=[]), "no tokens"),
        (spoiled(routed_experts="%%%"), "cannot be read"),
        (spoiled(routed_experts="AAAA"), "cannot be read"),
        (reply("completions").replace(b"-6.884614944458008", b"-1e999"), "not finite|not a completion"),
    ],
)
def test_replies_that_cannot_be_right_are_refused(body: bytes, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        taken(Vllm(), body)


def generation(finish: str = "stop", **meta: Any) -> bytes:
    drawn = [[-0.5, 70, None], [-0.25, 71, "b"]]
    info = {"finish_reason": {"type": finish}, "output_token_logprobs": drawn, **meta}
    return json.dumps({"text": "ab", "output_ids": [70, 71], "meta_info": info}).encode()


def test_a_reply_of_sglang() -> None:
    whole = (np.arange(9 * 4 * 2) % 8).astype(np.int32).reshape(9, 4, 2)
    dialect = Sglang(RouteShape(4, 2, 8))
    for sent in (whole, whole[6:]):
        body = generation(routed_experts=pybase64.b64encode_as_string(sent.tobytes()))
        drawn, routes = taken(dialect, body, start=6)
        assert drawn.token_ids.tolist() == [70, 71]
        assert drawn.logprobs.tolist() == [-0.5, -0.25]
        assert drawn.finish_reason == "stop"
        assert np.array_equal(routes, whole[6:])  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"config.json of 'model.path' does not say"):
        taken(Sglang(None), generation(routed_experts="AAAA"))
    assert taken(dialect, generation())[1] is None


def test_a_request_to_sglang() -> None:
    asked = json.loads(Sglang(None).request("m", PROMPT, SAMPLING, [7], 6))
    assert asked["input_ids"] == list(range(5, 13))
    assert asked["return_logprob"] is True
    assert asked["return_routed_experts"] is True
    assert asked["routed_experts_start_len"] == 6
    assert asked["sampling_params"]["max_new_tokens"] == 5
    assert asked["sampling_params"]["top_k"] == -1
    assert asked["sampling_params"]["stop_token_ids"] == [7]
    without = json.loads(Sglang(None).request("m", PROMPT, SAMPLING, [7], None))
    assert without["return_routed_experts"] is False


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{}", "not a generation"),
        (b'{"meta_info": {"finish_reason": {"type": "\x80"}}}', "not a generation.*utf-8"),
        (generation("abort"), "gave the request up"),
        (generation(output_token_logprobs=None), "no output_token_logprobs"),
        (generation(output_token_logprobs=[]), "no tokens"),
        (generation(output_token_logprobs=[[None, 70, None]]), "not finite"),
    ],
)
def test_generations_that_cannot_be_right_are_refused(body: bytes, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        taken(Sglang(None), body)


def test_errors_are_told_in_the_engines_words() -> None:
    body = b'{"error": {"message": "prompt too long", "type": "BadRequestError", "code": 400}}'
    assert problem(400, body) == "HTTP 400: prompt too long"
    assert problem(502, b"Bad Gateway") == "HTTP 502: Bad Gateway"
