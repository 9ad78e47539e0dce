"""Routes as engines send them: all or the new ones, of any integer, whole or dropped while they came."""

import io
import json
from pathlib import Path

import numpy as np
import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import EngineError
from rollway.inference.replies.body import BodyBuffer, BodyCutter, BulkString
from rollway.inference.replies.routes import (
    RouteShape,
    WantedRoutes,
    decode_bare,
    decode_npy,
    encode_npy,
    narrow,
    route_shape,
    unneeded_chars,
)
from rollway.records.turn import Routes

KEY = b'"routed_experts"'


def routes_of(rows: int, layers: int, topk: int, dtype: str, experts: int = 200) -> Routes:
    rng = np.random.default_rng(rows)
    return rng.integers(0, experts, (rows, layers, topk)).astype(dtype)


def arrived(text: str, wanted: WantedRoutes | None = None) -> BulkString:
    """The bulk as a body brings it, in pieces, without what is not wanted."""
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
def test_the_wanted_positions_whatever_the_engine_sends(
    num_prompt: int, drawn: int, extra: int, start: int, layers: int, topk: int, dtype: str,
    sends_all: bool,
) -> None:  # fmt: skip
    start = min(start, num_prompt - 1)
    wanted = WantedRoutes(start, num_prompt, drawn + extra)
    whole = routes_of(wanted.num_all(drawn), layers, topk, dtype)
    sent = whole if sends_all else whole[start:]
    found = decode_npy(arrived(encode_npy(sent), wanted), start, wanted.num_all(drawn))
    assert found.dtype in (np.uint8, np.uint16)
    assert np.array_equal(found, whole[start:])


def test_a_long_prefix_never_reaches_memory() -> None:
    whole = routes_of(4000, 48, 8, "uint8")
    wanted = WantedRoutes(start=3900, num_prompt=3950, max_tokens=64)
    bulk = arrived(encode_npy(whole), wanted)
    assert bulk.kept_from > 1_900_000
    assert np.array_equal(decode_npy(bulk, 3900, 4000), whole[3900:])


def test_more_new_positions_than_may_be_drawn() -> None:
    wanted = WantedRoutes(start=100, num_prompt=150, max_tokens=8)
    bulk = arrived(encode_npy(routes_of(200, 48, 8, "uint8")), wanted)
    with pytest.raises(EngineError, match="more positions than the request allows"):
        decode_npy(bulk, 100, 300)


@given(
    rows=st.integers(1, 40), start=st.integers(0, 39), layers=st.integers(1, 5),
    topk=st.integers(1, 4), experts=st.sampled_from([200, 300]),
)  # fmt: skip
def test_bare_integers(rows: int, start: int, layers: int, topk: int, experts: int) -> None:
    start = min(start, rows - 1)
    whole = routes_of(rows, layers, topk, "int32", experts)
    for sent in (whole, whole[start:]):
        text = pybase64.b64encode_as_string(np.ascontiguousarray(sent))
        found = decode_bare(arrived(text), RouteShape(layers, topk, experts), start, rows)
        assert found.dtype == (np.uint8 if experts <= 256 else np.uint16)
        assert np.array_equal(found, whole[start:])


def npy(array: object) -> str:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array))
    return pybase64.b64encode_as_string(buffer.getvalue())


GOOD = routes_of(12, 4, 2, "uint8")
NO_DTYPE = pybase64.b64decode(npy(GOOD)).replace(b"|u1", b"<u9")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("%%%%", "cannot be read"),
        ("AAAA", "not a .npy file"),
        (pybase64.b64encode_as_string(NO_DTYPE), "'<u9' not understood"),
        (npy(np.zeros((12, 4, 2), np.float32)), "float32 is not a type of integers"),
        (npy(np.zeros((12, 8), np.uint8)), r"is not \[tokens, layers, topk\]"),
        (npy(np.asfortranarray(GOOD)), r"is not \[tokens, layers, topk\]"),
        (npy(GOOD[:-1]), "for 12 positions"),
        (npy(GOOD)[:-8], "characters of base64 for uint8"),
        (npy(GOOD) + "AAAA", "cannot be read"),
        (npy(GOOD)[:-4] + "A===", "cannot be read"),
        (npy(GOOD)[:-6] + "!!" + npy(GOOD)[-4:], "cannot be read"),
        (npy(np.full((12, 4, 2), -1, np.int32)), "experts from -1"),
        (npy(np.full((12, 4, 2), 70_000, np.int32)), "experts from 70000"),
    ],
)
def test_routes_that_cannot_be_right_are_refused(text: str, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        decode_npy(arrived(text), 0, 12)


def test_bare_integers_that_do_not_fit_the_model() -> None:
    text = pybase64.b64encode_as_string(np.zeros(13, np.int32))
    with pytest.raises(EngineError, match="no whole number of tokens of 2 layers × 2"):
        decode_bare(arrived(text), RouteShape(2, 2, 8), 0, 3)
    with pytest.raises(EngineError, match="expected 0 to 7"):
        narrow(np.full((1, 2, 2), 8, np.int32), 8)


def test_the_shape_stands_in_the_models_config(tmp_path: Path) -> None:
    assert route_shape(str(tmp_path)) is None
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 48, "num_experts_per_tok": 8, "num_experts": 128}')
    assert route_shape(str(tmp_path)) == RouteShape(48, 8, 128)
    config.write_text('{"text_config": {"num_hidden_layers": 2, "num_experts_per_tok": 1}}')
    assert route_shape(str(tmp_path)) == RouteShape(2, 1, 0)
    config.write_text('{"num_hidden_layers": 2}')
    assert route_shape(str(tmp_path)) is None
