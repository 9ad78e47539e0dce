"""Cutting the bulk out of a body, whatever the pieces it arrives in."""

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollway.inference.body import BodyCutter

BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="


def pieces(body: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    return [body[a:b] for a, b in itertools.pairwise(at)]


@given(
    bulk=st.one_of(st.none(), st.text(BASE64, max_size=300)),
    text=st.text(max_size=20),
    spaced=st.booleans(),
    present=st.booleans(),
    cuts=st.lists(st.integers(0, 600), max_size=30),
)
def test_what_is_cut_and_what_is_left(
    bulk: str | None, text: str, spaced: bool, present: bool, cuts: list[int]
) -> None:
    choice: dict[str, Any] = {"text": text, "token_ids": [1, 2, 3]}
    if present:
        choice["routed_experts"] = bulk
    choice["finish_reason"] = "stop"
    body = json.dumps({"choices": [choice], "usage": {}}, separators=None if spaced else (",", ":"))
    cutter = BodyCutter()
    for piece in pieces(body.encode(), cuts):
        cutter.feed(piece)
    rest = json.loads(cutter.rest)["choices"][0]
    if present and bulk is not None:
        assert cutter.bulk is not None
        assert cutter.bulk.decode() == bulk
        assert rest == {**choice, "routed_experts": ""}
    else:
        assert cutter.bulk is None
        assert rest == choice


def test_pieces_of_one_byte() -> None:
    body = b'{"choices": [{"routed_experts" : "QUJD", "token_ids": [1]}]}'
    cutter = BodyCutter()
    for n in range(len(body)):
        cutter.feed(body[n : n + 1])
    assert cutter.bulk == b"QUJD"
    assert json.loads(cutter.rest)["choices"][0]["token_ids"] == [1]
