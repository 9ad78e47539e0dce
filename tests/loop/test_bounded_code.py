"""User code that refuses to end is given up, and its line is named."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from rollway.errors import CodeRefused
from rollway.loop.bounded_code import BoundedCode, must_end_within

pytestmark = pytest.mark.anyio


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def fail() -> int:
    raise ValueError("broken")


@pytest.fixture
async def may_end() -> AsyncIterator[asyncio.Event]:
    event = asyncio.Event()
    yield event
    event.set()


async def refuse(may_end: asyncio.Event) -> int:
    while not may_end.is_set():
        with suppress(asyncio.CancelledError):
            await may_end.wait()
    return 0


async def refuse_within(limit_s: float, may_end: asyncio.Event) -> int:
    with must_end_within(limit_s, "the rollout"), suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await refuse(may_end)
    return 1


async def test_code_that_ends_has_its_result() -> None:
    assert await BoundedCode(answer(), name="a").wait() == 42
    with pytest.raises(ValueError, match="broken"):
        await BoundedCode(fail(), name="b").wait()


async def test_code_that_ends_when_it_is_cancelled_is_cancelled() -> None:
    code = BoundedCode(asyncio.sleep(60), name="a")
    await asyncio.sleep(0)
    code.cancel()
    with pytest.raises(asyncio.CancelledError):
        await code.wait()
    assert not code.is_given_up


async def test_code_that_refuses_to_be_cancelled_is_given_up(may_end: asyncio.Event) -> None:
    code = BoundedCode(refuse(may_end), name="a", grace_s=0.1)
    await asyncio.sleep(0)
    code.cancel()
    with pytest.raises(CodeRefused, match=r"went on for 0\.1 s .* in refuse$") as caught:
        await code.wait()
    assert code.is_given_up
    assert __file__ in caught.value.where
    assert code.left_code_at == caught.value.where


async def test_code_that_passes_a_deadline_of_its_own_is_given_up(
    may_end: asyncio.Event,
) -> None:
    code = BoundedCode(refuse_within(0.05, may_end), name="a", grace_s=0.1)
    with pytest.raises(CodeRefused, match=r"the rollout went on .* deadline of 0\.05 s"):
        await code.wait()


async def test_a_caller_that_is_cancelled_does_not_cancel_the_code() -> None:
    code = BoundedCode(asyncio.sleep(0.05, "done"), name="a")
    waiting = asyncio.create_task(code.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await code.wait() == "done"


async def test_code_that_ended_leaves_no_cycle_for_the_collector() -> None:
    gc.collect()
    for _ in range(20):
        await BoundedCode(answer(), name="a").wait()
    await asyncio.sleep(0)
    assert gc.collect() < 20, "each would leave a task, its context and its coroutine"
