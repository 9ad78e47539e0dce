"""Cutting bulks out of a body, whatever the pieces it arrives in."""

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollway.inference.replies.body import HEAD_CHARS, BodyBuffer, BodyCutter

BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
ROUTES, PROMPT = b'"routed_experts"', b'"prompt_routed_experts"'
bulks = st.one_of(st.none(), st.text(BASE64, max_size=300))
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(['routed_experts', '"routed_experts": "', 'x "routed_experts', 'routed_experts"']),
)  # fmt: skip


def feed(cutter: BodyCutter, body: bytes, cuts: list[int]) -> None:
    at = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    for start, end in itertools.pairwise(at):
        cutter.feed(bytearray(b"##" + body[start:end] + b"##"), 2, 2 + end - start)


@given(
    of_reply=bulks, of_prompt=bulks, prompt_first=st.booleans(), text=texts,
    spaced=st.booleans(), cuts=st.lists(st.integers(0, 1200), max_size=30),
)  # fmt: skip
def test_what_is_cut_and_what_is_left(
    of_reply: str | None, of_prompt: str | None, prompt_first: bool, text: str, spaced: bool,
    cuts: list[int],
) -> None:  # fmt: skip
    choice: dict[str, Any] = {"text": text, "routed_experts": of_reply, "finish_reason": "stop"}
    fields: dict[str, Any] = {"choices": [choice], "prompt_routed_experts": of_prompt, "usage": {}}
    if prompt_first:
        fields = dict(reversed(fields.items()))
    body = json.dumps(fields, separators=None if spaced else (",", ":")).encode()
    cutter = BodyCutter(BodyBuffer(1))
    feed(cutter, body, cuts)
    rest = json.loads(cutter.rest)
    for key, said, left in (
        (ROUTES, of_reply, rest["choices"][0]["routed_experts"]),
        (PROMPT, of_prompt, rest["prompt_routed_experts"]),
    ):
        if said is None:
            assert key not in cutter.bulks
            assert left is None
        else:
            assert bytes(cutter.bulks[key].from_char(0)).decode() == said
            assert cutter.bulks[key].num_chars == len(said)
            assert left == ""
    assert rest["choices"][0]["text"] == text


@given(
    length=st.integers(HEAD_CHARS, 6000),
    skip=st.integers(0, 1800).map(lambda n: 4 * n),
    cuts=st.lists(st.integers(0, 6100), max_size=20),
)
def test_what_nobody_needs_is_dropped_as_it_comes(length: int, skip: int, cuts: list[int]) -> None:
    skip = min(skip, length // 4 * 4)
    text = "".join(BASE64[n % 64] for n in range(length))
    body = json.dumps({"routed_experts": text, "usage": 1}).encode()
    spool = BodyBuffer()
    cutter = BodyCutter(spool, lambda key, bulk: skip)
    feed(cutter, body, cuts)
    bulk = cutter.bulks[ROUTES]
    assert bulk.num_chars == length
    assert bulk.head.decode() == text[:HEAD_CHARS]
    assert bytes(bulk.from_char(max(skip, bulk.kept_from))).decode() == text[skip:]
    if bulk.kept_from:
        assert spool.length == HEAD_CHARS + max(0, length - skip)
    assert json.loads(cutter.rest) == {"routed_experts": "", "usage": 1}


def test_a_spool_is_written_to_again() -> None:
    spool = BodyBuffer(4)
    for word in (b"long enough to grow", b"short"):
        spool.clear()
        spool.add(word, 0, len(word))
        assert bytes(spool.view(0, spool.length)) == word
