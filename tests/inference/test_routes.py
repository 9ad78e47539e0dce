"""Decoding routes: all positions or only new ones, any integer type, parts dropped on arrival."""

import io
import json

import numpy as np
import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import EngineError
from rollway.inference.replies.body import BodyBuffer, BodyCutter, BulkString
from rollway.inference.replies.routes import (
    WantedRoutes,
    decode_bare,
    decode_npy,
    encode_npy,
    narrow,
    unneeded_chars,
)
from rollway.model.shape import ModelShape
from rollway.records.turn import Routes

KEY = b'"routed_experts"'


def random_routes(
    positions: int, layers: int, topk: int, dtype: str, experts: int = 200
) -> Routes:
    rng = np.random.default_rng(positions)
    return rng.integers(0, experts, (positions, layers, topk)).astype(dtype)


def receive(text: str, wanted: WantedRoutes | None = None) -> BulkString:
    """Return the bulk of a body that arrived in pieces, without the unwanted part."""
    body = json.dumps({"routed_experts": text}).encode()

    def skip(key: bytes, bulk: BulkString) -> int:
        return unneeded_chars(bulk, wanted, is_prompt_only=False) if wanted else 0

    cutter = BodyCutter(BodyBuffer(), skip)
    for start in range(0, len(body), 1500):
        cutter.feed(body, start, min(start + 1500, len(body)))
    return cutter.bulks[KEY]


@given(
    num_prompt=st.integers(1, 300), drawn=st.integers(1, 60), extra=st.integers(0, 20),
    start=st.integers(0, 300), layers=st.integers(1, 7), topk=st.integers(1, 5),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]), sends_all=st.booleans(),
)  # fmt: skip
def test_the_wanted_positions_are_decoded_whatever_the_engine_sends(
    num_prompt: int, drawn: int, extra: int, start: int, layers: int, topk: int, dtype: str,
    sends_all: bool,
) -> None:  # fmt: skip
    start = min(start, num_prompt - 1)
    wanted = WantedRoutes(start, num_prompt, drawn + extra)
    all_routes = random_routes(wanted.num_positions(drawn), layers, topk, dtype)
    sent = all_routes if sends_all else all_routes[start:]
    found = decode_npy(receive(encode_npy(sent), wanted), start, wanted.num_positions(drawn))
    assert found.dtype in (np.uint8, np.uint16)
    assert np.array_equal(found, all_routes[start:])


def test_a_long_unwanted_prefix_is_not_kept_in_memory() -> None:
    all_routes = random_routes(4000, 48, 8, "uint8")
    wanted = WantedRoutes(start=3900, num_prompt=3950, max_tokens=64)
    bulk = receive(encode_npy(all_routes), wanted)
    assert bulk.kept_from > 1_900_000
    assert np.array_equal(decode_npy(bulk, 3900, 4000), all_routes[3900:])


def test_more_new_positions_than_may_be_drawn_are_an_error() -> None:
    wanted = WantedRoutes(start=100, num_prompt=150, max_tokens=8)
    bulk = receive(encode_npy(random_routes(200, 48, 8, "uint8")), wanted)
    with pytest.raises(EngineError, match="more positions than the request allows"):
        decode_npy(bulk, 100, 300)


@given(
    positions=st.integers(1, 40), start=st.integers(0, 39), layers=st.integers(1, 5),
    topk=st.integers(1, 4), experts=st.sampled_from([200, 300]),
)  # fmt: skip
def test_integers_without_a_header_are_decoded(
    positions: int, start: int, layers: int, topk: int, experts: int
) -> None:
    start = min(start, positions - 1)
    all_routes = random_routes(positions, layers, topk, "int32", experts)
    for sent in (all_routes, all_routes[start:]):
        text = pybase64.b64encode_as_string(np.ascontiguousarray(sent))
        shape = ModelShape(num_layers=layers, topk=topk, num_experts=experts)
        found = decode_bare(receive(text), shape, start, positions)
        assert found.dtype == (np.uint8 if experts <= 256 else np.uint16)
        assert np.array_equal(found, all_routes[start:])


def npy(array: object) -> str:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array))
    return pybase64.b64encode_as_string(buffer.getvalue())


GOOD = random_routes(12, 4, 2, "uint8")
UNKNOWN_DTYPE = pybase64.b64decode(npy(GOOD)).replace(b"|u1", b"<u9")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("%%%%", "cannot be read"),
        ("AAAA", "not a .npy file"),
        (pybase64.b64encode_as_string(UNKNOWN_DTYPE), "'<u9' not understood"),
        (npy(np.zeros((12, 4, 2), np.float32)), "float32 is not a type of integers"),
        (npy(np.zeros((12, 8), np.uint8)), r"is not \[tokens, layers, topk\]"),
        (npy(np.asfortranarray(GOOD)), r"is not \[tokens, layers, topk\]"),
        (npy(GOOD[:-1]), "expected 12 positions"),
        (npy(GOOD)[:-8], "characters of base64 for uint8"),
        (npy(GOOD) + "AAAA", "cannot be read"),
        (npy(GOOD)[:-4] + "A===", "cannot be read"),
        (npy(GOOD)[:-6] + "!!" + npy(GOOD)[-4:], "cannot be read"),
        (npy(np.full((12, 4, 2), -1, np.int32)), "experts from -1"),
        (npy(np.full((12, 4, 2), 70_000, np.int32)), "experts from 70000"),
    ],
)
def test_wrong_routes_are_refused(text: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        decode_npy(receive(text), 0, 12)


def test_integers_that_do_not_fit_the_model_are_refused() -> None:
    text = pybase64.b64encode_as_string(np.zeros(13, np.int32))
    with pytest.raises(
        EngineError, match="52 bytes do not divide into tokens of 2 layers × 2"
    ):
        decode_bare(receive(text), ModelShape(num_layers=2, topk=2, num_experts=8), 0, 3)
    with pytest.raises(EngineError, match="expected 0 to 7"):
        narrow(np.full((1, 2, 2), 8, np.int32), 8)
