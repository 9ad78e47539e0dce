"""Prompts as JSON, real replies of vLLM, replies in SGLang's shape, and replies that must be refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import EngineError
from rollway.inference.engines.dialect import EMPTY_PROMPT, Dialect, make_prompt
from rollway.inference.engines.sglang import Sglang
from rollway.inference.engines.vllm import Vllm
from rollway.inference.replies.body import BodyBuffer, BodyCutter
from rollway.inference.replies.columns import ReplyColumns
from rollway.inference.replies.routes import WantedRoutes, encode_npy
from rollway.model.shape import ModelShape
from rollway.records.turn import Routes, Sampling

DATA = Path(__file__).parent / "data"
PROMPT = make_prompt(np.arange(5, 13, dtype=np.int32))
SAMPLING = Sampling(max_tokens=5, temperature=0.9)
ROUTES = np.arange(12 * 4 * 2).reshape(12, 4, 2)


def reply(name: str) -> bytes:
    return (DATA / f"vllm-0.30-{name}.json").read_bytes()


def read(dialect: Dialect, body: bytes, start: int = 0) -> tuple[ReplyColumns, Routes | None]:
    """Read a whole reply the way the engine client does."""
    wanted = WantedRoutes(start, len(PROMPT), SAMPLING.max_tokens)
    cutter = BodyCutter(
        BodyBuffer(), lambda key, bulk: dialect.unneeded_chars(key, bulk, wanted)
    )
    cutter.feed(body, 0, len(body))
    drawn = dialect.parse_columns(cutter.rest)
    return drawn, dialect.decode_routes(cutter.bulks, wanted, len(drawn.token_ids))


token_ids = st.lists(st.integers(0, 200_000), max_size=20)


@given(turns=st.lists(token_ids, max_size=6), fresh=st.integers(0, 6))
def test_the_json_of_a_prompt_holds_its_ids_however_often_it_was_extended(
    turns: list[list[int]], fresh: int
) -> None:
    """The turn number `fresh` starts with another prompt, the others extend the last one."""
    prompt, ids = EMPTY_PROMPT, list[int]()
    for number, new_ids in enumerate(turns):
        ids = new_ids if number == fresh else ids + new_ids
        prompt = make_prompt(np.array(ids, np.int32), prompt)
        assert json.loads(b"[" + prompt.text + b"]") == ids


def test_a_vllm_reply_may_hold_all_routes_or_only_the_new_ones() -> None:
    drawn, all_routes = read(Vllm(), reply("completions"))
    assert drawn.token_ids.tolist() == [510, 140, 70, 729, 906]
    assert drawn.logprobs[0] == pytest.approx(-6.884614944458008)
    assert drawn.versions is None
    assert drawn.finish_reason == "length"
    assert all_routes is not None
    assert all_routes.shape == (12, 4, 2)
    for name in ("completions", "completions-delta"):
        _, new = read(Vllm(), reply(name), start=6)
        assert new is not None
        assert new.tobytes() == all_routes[6:].tobytes()


def test_vllm_may_send_the_routes_of_prompt_and_reply_in_two_fields() -> None:
    tree = json.loads(reply("completions"))
    tree["prompt_routed_experts"] = encode_npy(ROUTES[:8].astype(np.uint8))
    tree["choices"][0]["routed_experts"] = encode_npy(ROUTES[8:].astype(np.uint8))
    _, all_routes = read(Vllm(), json.dumps(tree).encode())
    assert np.array_equal(all_routes, ROUTES)  # type: ignore[arg-type]
    _, new = read(Vllm(), json.dumps(tree).encode(), start=6)
    assert np.array_equal(new, ROUTES[6:])  # type: ignore[arg-type]
    tree["prompt_routed_experts"] = encode_npy(ROUTES[6:8].astype(np.uint8))
    _, new = read(Vllm(), json.dumps(tree).encode(), start=6)
    assert np.array_equal(new, ROUTES[6:])  # type: ignore[arg-type]


def test_a_request_to_vllm_sets_everything_that_shapes_the_distribution() -> None:
    request = json.loads(Vllm().encode_request("m", PROMPT, SAMPLING, [7], 6))
    assert request == {
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
    ("body", "message"),
    [
        (b"<html>", "not a completion"),
        (b'{"choices": []}', "not a completion"),
        (b'{"choices": [{"finish_reason": "\x80"}]}', "not a completion.*utf-8"),
        (b'{"usage": ' + b"[" * 100_000, "not a completion"),
        (spoiled(token_ids=None), "no token_ids"),
        (spoiled(logprobs=None), "no logprobs"),
        (spoiled(token_ids=[]), "no tokens"),
        (spoiled(token_ids=[1, 2]), "has 2 tokens and 5 logprobs"),
        (spoiled(token_versions=[1]), "has 5 tokens and 1 versions"),
        (spoiled(routed_experts="%%%"), "cannot be read"),
        (spoiled(routed_experts="AAAA"), "cannot be read"),
        (
            reply("completions").replace(b"-6.884614944458008", b"-1e999"),
            "not finite|not a completion",
        ),
    ],
)
def test_wrong_vllm_replies_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read(Vllm(), body)


def generation(finish: str = "stop", **meta: Any) -> bytes:
    drawn = [[-0.5, 70, None], [-0.25, 71, "b"]]
    info = {"finish_reason": {"type": finish}, "output_token_logprobs": drawn, **meta}
    return json.dumps({"text": "ab", "output_ids": [70, 71], "meta_info": info}).encode()


def test_an_sglang_reply_may_hold_all_routes_or_only_the_new_ones() -> None:
    all_routes = (np.arange(9 * 4 * 2) % 8).astype(np.int32).reshape(9, 4, 2)
    dialect = Sglang(ModelShape(num_layers=4, topk=2, num_experts=8))
    for sent in (all_routes, all_routes[6:]):
        body = generation(routed_experts=pybase64.b64encode_as_string(sent.tobytes()))
        drawn, routes = read(dialect, body, start=6)
        assert drawn.token_ids.tolist() == [70, 71]
        assert drawn.logprobs.tolist() == [-0.5, -0.25]
        assert drawn.finish_reason == "stop"
        assert np.array_equal(routes, all_routes[6:])  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"config.json of 'model.path' does not say"):
        read(Sglang(None), generation(routed_experts="AAAA"))
    assert read(dialect, generation())[1] is None


def test_a_request_to_sglang_sets_everything_that_shapes_the_distribution() -> None:
    request = json.loads(Sglang(None).encode_request("m", PROMPT, SAMPLING, [7], 6))
    assert request["input_ids"] == list(range(5, 13))
    assert request["return_logprob"] is True
    assert request["return_routed_experts"] is True
    assert request["routed_experts_start_len"] == 6
    assert request["sampling_params"]["max_new_tokens"] == 5
    assert request["sampling_params"]["top_k"] == -1
    assert request["sampling_params"]["stop_token_ids"] == [7]
    without = json.loads(Sglang(None).encode_request("m", PROMPT, SAMPLING, [7], None))
    assert without["return_routed_experts"] is False


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "not a generation"),
        (b'{"meta_info": {"finish_reason": {"type": "\x80"}}}', "not a generation.*utf-8"),
        (generation("abort"), "aborted the request"),
        (generation(output_token_logprobs=None), "no output_token_logprobs"),
        (generation(output_token_logprobs=[]), "no tokens"),
        (generation(output_token_logprobs=[[None, 70, None]]), "not finite"),
    ],
)
def test_wrong_sglang_replies_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read(Sglang(None), body)
