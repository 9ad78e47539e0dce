"""Several engines, and engines that go away and come back: real servers, stopped and started."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from tests.doubles.versioned import VersionedEngine, versioned_engine

from rollway.errors import EngineAway, EngineError
from rollway.inference.engines.pool import EnginePool, PinnedEngine, PoolConfig, open_pool
from rollway.inference.engines.prompt import prompt_of
from rollway.records.turn import Sampling, Turn

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def pool_of(
    *engines: VersionedEngine, patience_s: float = 60.0, is_patient: bool = False
) -> AsyncIterator[EnginePool]:
    config = PoolConfig(
        urls=tuple(engine.url for engine in engines), model="", key="", routes=False, shape=None,
        deadline_s=30.0, patience_s=patience_s,
    )  # fmt: skip
    async with open_pool(config, None, is_patient=is_patient) as pool:
        yield pool


async def ask(seat: PinnedEngine, number: int) -> Turn:
    return await seat.complete(prompt_of(np.array([number], np.int32)), Sampling(4), [], 0)


def prompts(engine: VersionedEngine) -> list[int]:
    return [prompt[0] for prompt, _ in engine.asked]


async def test_groups_are_spread_and_each_keeps_to_its_engine() -> None:
    async with versioned_engine() as a, versioned_engine() as b, pool_of(a, b) as pool:
        for group in range(4):
            for _member in range(2):
                seat = pool.seat(group)
                for _turn in range(3):
                    await ask(seat, group)
    assert prompts(a) == [0] * 6 + [2] * 6
    assert prompts(b) == [1] * 6 + [3] * 6


async def test_a_rollout_whose_engine_is_down_goes_on_at_another_and_stays_there() -> None:
    async with versioned_engine() as a, versioned_engine() as b, pool_of(a, b) as pool:
        seat = pool.seat(0)
        await ask(seat, 0)
        await a.stop()
        await ask(seat, 1)
        await a.start()
        await ask(seat, 2)
    assert (prompts(a), prompts(b)) == ([0], [1, 2])


async def test_while_there_is_no_engine_rollouts_wait_for_one() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        await ask(pool.seat(0), 0)
        await engine.stop()
        waiting = [asyncio.create_task(ask(pool.seat(n), n)) for n in range(1, 9)]
        await asyncio.sleep(0.6)
        assert not any(one.done() for one in waiting)
        await engine.start()
        await asyncio.gather(*waiting)
    assert sorted(prompts(engine)) == list(range(9))


async def test_one_that_never_comes_back_fails_the_turn_with_its_name() -> None:
    async with versioned_engine() as engine, pool_of(engine, patience_s=0.5) as pool:
        await engine.stop()
        with pytest.raises(EngineError, match=rf"{engine.url}.*cannot connect.*; waited for \d+ s"):
            await ask(pool.seat(0), 0)


async def test_an_engine_that_comes_back_with_old_weights_draws_nothing_until_it_has_new_ones() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.version, pool.version = "3", 3
        seat = pool.seat(0)
        assert (await ask(seat, 0)).versions.tolist() == [3]
        await engine.stop()
        await engine.start()
        assert engine.version == "default"
        turn = asyncio.create_task(ask(seat, 1))
        num_calls = len(engine.calls)
        await engine.until(lambda: len(engine.calls) >= num_calls + 2)
        assert prompts(engine) == [0], "it said twice that it is behind, and was asked for nothing"
        engine.version = "3"
        assert (await turn).versions.tolist() == [3]
    assert [version for _, version in engine.asked] == ["3", "3"]


async def test_a_connection_is_good_for_the_version_that_was_seen_on_it() -> None:
    """An engine that missed an update, and whose connections outlived that, must not be asked."""
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.version, pool.version = "1", 1
        seat = pool.seat(0)
        for number in range(3):
            await ask(seat, number)
        assert engine.calls == ["/weight_info"], "once for a connection"
        pool.version = 2
        turn = asyncio.create_task(ask(seat, 3))
        await engine.until(lambda: len(engine.calls) >= 3)
        assert not turn.done()
        engine.version = "2"
        assert (await turn).versions.tolist() == [2]
    assert engine.asked[-1] == ([3], "2")


async def test_an_engine_may_be_ahead_of_what_is_known_of_it() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.version, pool.version = "5", 4
        assert (await ask(pool.seat(0), 0)).versions.tolist() == [4]


async def test_an_engine_that_does_not_say_its_version_is_believed() -> None:
    async with versioned_engine(is_mute=True) as engine, pool_of(engine) as pool:
        pool.version = 3
        assert (await ask(pool.seat(0), 0)).versions.tolist() == [3]


async def test_a_request_that_engines_go_away_with_is_given_up() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.hangs_up_on = lambda prompt: prompt == [13]
        with pytest.raises(EngineError, match="5 times with this request"):
            await ask(pool.seat(0), 13)
        await ask(pool.seat(0), 14)
    assert prompts(engine)[-1] == 14


async def test_at_the_start_every_engine_must_answer_and_serve_the_same() -> None:
    async with versioned_engine() as a, versioned_engine(model="other") as b, versioned_engine() as c:
        with pytest.raises(EngineError, match=f"the engine at {a.url} serves 'm' .* {b.url} 'other'"):
            await pool_of(a, b).__aenter__()
        await c.stop()
        with pytest.raises(EngineAway, match=f"no engine at {c.url}"):
            await pool_of(a, c).__aenter__()


async def test_later_one_that_answers_is_enough_and_is_waited_for() -> None:
    async with versioned_engine() as a, versioned_engine() as b:
        await a.stop()
        async with pool_of(a, b, is_patient=True) as pool:
            await ask(pool.seat(0), 0)
        await b.stop()
        async with AsyncExitStack() as stack:
            opened = stack.enter_async_context(pool_of(a, b, is_patient=True))
            opening = asyncio.create_task(opened)
            await a.start()
            await ask((await opening).seat(1), 1)
        await a.stop()
        with pytest.raises(EngineError, match=r"waited for 0\.1 s"):
            await pool_of(a, b, patience_s=0.1, is_patient=True).__aenter__()
    assert (prompts(a), prompts(b)) == ([1], [0])
