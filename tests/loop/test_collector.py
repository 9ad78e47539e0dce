"""Garbage is collected in short steps, and what is in use is not looked at again."""

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from rollway.loop.watch.collector import EVERY_S, Collector

pytestmark = pytest.mark.anyio


class Node:
    """Refers to itself, so that only a collector frees it."""

    def __init__(self) -> None:
        self.own = self


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(EVERY_S)


async def test_new_cycles_are_collected_and_what_is_in_use_is_set_aside() -> None:
    with Collector():
        assert not gc.isenabled(), "it runs in place of Python's own collector"
        kept = [Node() for _ in range(1000)]
        garbage = weakref.ref(Node())
        await until(lambda: garbage() is None)
        await until(lambda: not any(kind is Node for kind in map(type, gc.get_objects())))
        freed = weakref.ref(kept[0])
        kept[0].own = None  # type: ignore[assignment]
        kept.pop(0)
        assert freed() is None, "what is set aside is freed like everything else"
    assert gc.isenabled()
    gc.unfreeze()


async def test_cycles_that_were_set_aside_are_found_once_memory_has_grown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Collector(min_growth_bytes=32 << 20, look_at_memory_s=0.0) as collector:
        old = Node()
        await until(lambda: not any(kind is Node for kind in map(type, gc.get_objects())))
        garbage = weakref.ref(old)
        del old
        for _ in range(20):
            await asyncio.sleep(EVERY_S)
        assert garbage() is not None, "nothing looks at it"
        collector.rss_bytes = 0
        ballast = bytearray(64 << 20)
        with caplog.at_level("INFO"):
            await until(lambda: garbage() is None)
        assert "memory had grown to" in caplog.text
        assert len(ballast)
    gc.unfreeze()
