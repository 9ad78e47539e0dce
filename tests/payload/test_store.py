"""Frames under way are bounded in bytes and served in order, and cancellation loses nothing."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.payload.blob import Column, build, parse
from rollway.payload.store import ByteWindow, FrameStore

pytestmark = pytest.mark.anyio


def column_of(size: int, value: int = 1) -> dict[str, Column]:
    return {"a": [np.full(size, value, np.uint8)]}


async def test_a_stored_blob_comes_back_as_a_frame_beside_its_ref() -> None:
    stored = await FrameStore(1 << 20).store(column_of(100, 7))
    assert stored.ref.is_frame
    assert stored.frame is not None
    assert len(stored.frame) == stored.ref.length
    assert parse(stored.frame)["a"].tolist() == [7] * 100


async def test_at_the_bound_appends_wait_for_the_receiver() -> None:
    store = FrameStore(3 * build(column_of(1000)).length)
    waiting = [asyncio.create_task(store.store(column_of(1000))) for _ in range(5)]
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    while len(done) < 3:
        done |= (await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED))[0]
        pending = {task for task in waiting if not task.done()}
    store.taken(build(column_of(1000)).length)
    fourth = await waiting[3]
    assert not waiting[4].done()
    waiting[4].cancel()
    store.taken(3 * fourth.ref.length)
    await store.store(column_of(2000))


async def test_a_cancelled_append_gives_its_bytes_back() -> None:
    store = FrameStore(1000)
    append = asyncio.create_task(store.store(column_of(100_000)))
    await asyncio.sleep(0)
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    await store.store(
        column_of(200_000)
    )  # more than the window: only if nothing else is on its way


@given(
    st.integers(1, 100),
    st.lists(
        st.tuples(st.sampled_from(["take", "give", "cancel"]), st.integers(1, 150)),
        max_size=40,
    ),
)
def test_the_window_keeps_its_limit_and_order(
    limit: int, acts: list[tuple[str, int]]
) -> None:
    async def play() -> None:
        window = ByteWindow(limit)
        waiting: list[tuple[int, asyncio.Task[None]]] = []
        inside: list[int] = []
        for act, number in acts:
            if act == "take":
                waiting.append((number, asyncio.create_task(window.take(number))))
            elif act == "give" and inside:
                window.give(inside.pop(0))
            elif act == "cancel" and waiting:
                waiting.pop(number % len(waiting))[1].cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            done = [task.done() for _, task in waiting]
            assert done == sorted(done, reverse=True), "a later caller was served first"
            inside += [size for size, task in waiting if task.done()]
            waiting = [(size, task) for size, task in waiting if not task.done()]
            assert window.num_bytes == sum(inside)
            assert sum(inside) <= limit or len(inside) == 1
            if waiting:
                assert inside, "a caller waits though nothing is under way"
        for _, task in waiting:
            task.cancel()

    asyncio.run(play())
