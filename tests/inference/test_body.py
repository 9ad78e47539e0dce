"""The long strings of a body are cut out correctly, whatever the pieces it arrives in."""

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
    reply_bulk=bulks, prompt_bulk=bulks, prompt_first=st.booleans(), text=texts,
    spaced=st.booleans(), cuts=st.lists(st.integers(0, 1200), max_size=30),
)  # fmt: skip
def test_bulks_are_cut_out_and_the_rest_stays_valid_json(
    reply_bulk: str | None, prompt_bulk: str | None, prompt_first: bool, text: str, spaced: bool,
    cuts: list[int],
) -> None:  # fmt: skip
    choice: dict[str, Any] = {
        "text": text,
        "routed_experts": reply_bulk,
        "finish_reason": "stop",
    }
    fields: dict[str, Any] = {
        "choices": [choice],
        "prompt_routed_experts": prompt_bulk,
        "usage": {},
    }
    if prompt_first:
        fields = dict(reversed(fields.items()))
    body = json.dumps(fields, separators=None if spaced else (",", ":")).encode()
    cutter = BodyCutter(BodyBuffer(1))
    feed(cutter, body, cuts)
    rest = json.loads(cutter.rest)
    for key, sent, left in (
        (ROUTES, reply_bulk, rest["choices"][0]["routed_experts"]),
        (PROMPT, prompt_bulk, rest["prompt_routed_experts"]),
    ):
        if sent is None:
            assert key not in cutter.bulks
            assert left is None
        else:
            assert bytes(cutter.bulks[key].from_char(0)).decode() == sent
            assert cutter.bulks[key].num_chars == len(sent)
            assert left == ""
    assert rest["choices"][0]["text"] == text


@given(
    length=st.integers(HEAD_CHARS, 6000),
    skip=st.integers(0, 1800).map(lambda n: 4 * n),
    cuts=st.lists(st.integers(0, 6100), max_size=20),
)
def test_unneeded_characters_are_dropped_as_they_arrive(
    length: int, skip: int, cuts: list[int]
) -> None:
    skip = min(skip, length // 4 * 4)
    text = "".join(BASE64[n % 64] for n in range(length))
    body = json.dumps({"routed_experts": text, "usage": 1}).encode()
    body_buffer = BodyBuffer()
    cutter = BodyCutter(body_buffer, lambda key, bulk: skip)
    feed(cutter, body, cuts)
    bulk = cutter.bulks[ROUTES]
    assert bulk.num_chars == length
    assert bulk.head.decode() == text[:HEAD_CHARS]
    assert bytes(bulk.from_char(max(skip, bulk.kept_from))).decode() == text[skip:]
    if bulk.kept_from:
        assert body_buffer.length == HEAD_CHARS + max(0, length - skip)
    assert json.loads(cutter.rest) == {"routed_experts": "", "usage": 1}


def test_a_body_buffer_can_be_used_again() -> None:
    body_buffer = BodyBuffer(4)
    for word in (b"long enough to grow", b"short"):
        body_buffer.clear()
        body_buffer.add(word, 0, len(word))
        assert bytes(body_buffer.view(0, body_buffer.length)) == word
