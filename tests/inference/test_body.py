"""Bodies of replies: their long strings are cut out, and large ones wait for a place."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollway.inference.http.client import HttpClient
from rollway.inference.http.framing import HttpAway
from rollway.inference.replies.body import (
    HEAD_CHARS,
    INLINE_BODY_BYTES,
    BodyBuffer,
    BodyBuffers,
    BodyCutter,
)
from rollway.testing.engine import served

LARGE = bytes(INLINE_BODY_BYTES + 1)

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


@asynccontextmanager
async def large_replies() -> AsyncIterator[HttpClient]:
    """A client of a server whose replies need a place."""

    async def reply(request: web.Request) -> web.Response:
        return web.Response(body=LARGE)

    app = web.Application()
    app.router.add_get("/", reply)
    async with served(app) as url:
        client = HttpClient(url)
        try:
            yield client
        finally:
            client.close()


@pytest.mark.anyio
async def test_a_large_body_behind_others_that_do_not_end_is_given_up() -> None:
    buffers = BodyBuffers(1, idle_s=0.2)
    async with large_replies() as client:
        async with (
            buffers.borrow(len(LARGE)),
            asyncio.timeout(10),
        ):
            with pytest.raises(
                HttpAway, match=r"waited 0\.2 s .* have stopped in the middle"
            ) as caught:
                await buffers.borrow(len(LARGE)).__aenter__()
            assert caught.value.request_was_sent
        async with client.request("GET", "/") as reply, buffers.borrow(len(LARGE)) as buffer:
            await reply.read(buffer.add)
            assert buffer.length == len(LARGE)


@pytest.mark.anyio
async def test_a_large_body_waits_as_long_as_others_end() -> None:
    """Together the bodies take longer than one of them may wait while none ends."""
    buffers = BodyBuffers(1, idle_s=1.5)
    async with large_replies() as client:

        async def read_slowly() -> int:
            async with (
                client.request("GET", "/") as reply,
                buffers.borrow(len(LARGE)) as buffer,
            ):
                await asyncio.sleep(0.5)
                await reply.read(buffer.add)
                return buffer.length

        lengths = await asyncio.gather(*(read_slowly() for _ in range(5)))
    assert lengths == [len(LARGE)] * 5
