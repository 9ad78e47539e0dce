"""Several engines, and engines that go away and come back: real servers that are stopped and started."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from tests.doubles.versioned import VersionedEngine, versioned_engine

from rollway.errors import ConfigError, EngineAway, EngineError, EngineLate
from rollway.inference.engines.dialect import make_prompt
from rollway.inference.engines.engine import ExpectedPolicy
from rollway.inference.engines.link import EngineAccess
from rollway.inference.engines.pool import (
    MAX_LOST,
    EnginePool,
    PinnedEngine,
    PoolConfig,
    open_pool,
)
from rollway.inference.http.connection import IDLE_S
from rollway.inference.replies.body import INLINE_BODY_BYTES
from rollway.inference.replies.checks import ReplyRules
from rollway.model.shape import ModelShape
from rollway.records.turn import Sampling, Turn

pytestmark = pytest.mark.anyio

RULES = ReplyRules(wants_routes=False, knows_versions=True)


@asynccontextmanager
async def pool_of(
    *engines: VersionedEngine,
    patience_s: float = 60.0,
    is_patient: bool = False,
    deadline_s: float = 30.0,
    rules: ReplyRules = RULES,
) -> AsyncIterator[EnginePool]:
    config = PoolConfig(
        engines=tuple(EngineAccess(engine.url, deadline_s) for engine in engines),
        rules=rules,
        patience_s=patience_s,
    )
    async with open_pool(config, ExpectedPolicy(), None, is_patient=is_patient) as pool:
        yield pool


async def ask(engine: PinnedEngine, number: int) -> Turn:
    return await engine.complete(
        make_prompt(np.array([number], np.int32)), Sampling(4), [], 0
    )


def prompts(engine: VersionedEngine) -> list[int]:
    return [prompt[0] for prompt, _ in engine.requests]


async def test_groups_are_spread_over_the_engines_and_each_stays_with_one() -> None:
    async with versioned_engine() as a, versioned_engine() as b, pool_of(a, b) as pool:
        for group in range(4):
            for _member in range(2):
                pinned = pool.pin(group)
                for _turn in range(3):
                    await ask(pinned, group)
    assert prompts(a) == [0] * 6 + [2] * 6
    assert prompts(b) == [1] * 6 + [3] * 6


async def test_a_rollout_moves_to_another_engine_when_its_own_stops_and_stays_there() -> None:
    async with versioned_engine() as a, versioned_engine() as b, pool_of(a, b) as pool:
        pinned = pool.pin(0)
        await ask(pinned, 0)
        await a.stop()
        await ask(pinned, 1)
        await a.start("0")
        await ask(pinned, 2)
    assert (prompts(a), prompts(b)) == ([0], [1, 2])


async def test_rollouts_wait_while_no_engine_answers() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        await ask(pool.pin(0), 0)
        await engine.stop()
        waiting = [asyncio.create_task(ask(pool.pin(n), n)) for n in range(1, 9)]
        await asyncio.sleep(0.6)  # longer than the first pause of an engine that went away
        assert not any(request.done() for request in waiting)
        await engine.start("0")
        await asyncio.gather(*waiting)
    assert sorted(prompts(engine)) == list(range(9))


async def test_an_engine_that_never_comes_back_fails_the_request_with_its_url() -> None:
    async with versioned_engine() as engine, pool_of(engine, patience_s=0.5) as pool:
        await engine.stop()
        with pytest.raises(
            EngineError, match=rf"{engine.url}.*cannot connect.*; waited [\d.]+ s"
        ):
            await ask(pool.pin(0), 0)


async def test_an_engine_that_comes_back_with_old_weights_gets_no_request_until_it_is_updated() -> (
    None
):
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.version, pool.policy.version = "3", 3
        pinned = pool.pin(0)
        assert (await ask(pinned, 0)).versions.tolist() == [3]
        await engine.stop()
        await engine.start()
        assert engine.version == "default"
        turn = asyncio.create_task(ask(pinned, 1))
        num_calls = len(engine.calls)
        await engine.wait_until(lambda: len(engine.calls) >= num_calls + 2)
        assert prompts(engine) == [0], "it reported an old version twice, and got no request"
        engine.version = "3"
        assert (await turn).versions.tolist() == [3]
    assert [version for _, version in engine.requests] == ["3", "3"]


async def test_a_connection_is_checked_once_for_each_version() -> None:
    """An engine that missed an update gets no request, even on a connection that was fine before."""
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.version, pool.policy.version = "1", 1
        pinned = pool.pin(0)
        for number in range(3):
            await ask(pinned, number)
        assert engine.calls == ["/weight_info"], "asked once on this connection"
        pool.policy.version = 2
        turn = asyncio.create_task(ask(pinned, 3))
        await engine.wait_until(lambda: len(engine.calls) >= 3)
        assert not turn.done()
        engine.version = "2"
        assert (await turn).versions.tolist() == [2]
    assert engine.requests[-1] == ([3], "2")


async def test_an_engine_may_have_a_later_version_than_expected() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.version, pool.policy.version = "5", 4
        assert (await ask(pool.pin(0), 0)).versions.tolist() == [4]


async def test_an_engine_that_does_not_report_its_version_gets_requests() -> None:
    async with versioned_engine(hides_version=True) as engine, pool_of(engine) as pool:
        pool.policy.version = 3
        assert (await ask(pool.pin(0), 0)).versions.tolist() == [3]


@pytest.mark.parametrize("status", [500, 503])
async def test_an_engine_that_cannot_tell_its_version_yet_is_asked_again(status: int) -> None:
    async with versioned_engine() as engine, pool_of(engine, patience_s=0.1) as pool:
        pool.policy.version, engine.version_status = 3, status
        with pytest.raises(EngineError, match=f"/weight_info: HTTP {status}.*; waited"):
            await ask(pool.pin(0), 0)
        engine.version_status = 200
        with pytest.raises(EngineError, match="has version '0', not 3 yet"):
            await ask(pool.pin(0), 1)
    assert prompts(engine) == []


async def test_a_request_during_which_engines_keep_going_away_fails() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.hangs_up_on = lambda prompt: prompt == [13]
        with pytest.raises(EngineError, match="this request was lost 5 times"):
            await ask(pool.pin(0), 13)
        await ask(pool.pin(0), 14)
    assert prompts(engine)[-1] == 14


async def test_a_reply_that_was_cut_off_is_asked_for_again() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.aborts_next = 2
        turn = await ask(pool.pin(0), 1)
        assert turn.finish_reason == "stop"
        assert prompts(engine) == [1, 1, 1]
        engine.aborts_next = 99
        with pytest.raises(EngineError, match=r"'abort'.*; this request was lost 5 times"):
            await ask(pool.pin(0), 2)


async def test_status_500_of_an_engine_that_is_ending_counts_as_away() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.is_failing = True
        with pytest.raises(EngineError, match="HTTP 500: EngineCore") as caught:
            await ask(pool.pin(0), 1)
        assert not isinstance(caught.value, EngineAway), (
            "it is healthy: the request is to blame"
        )
        engine.health_status = 503
        turn = asyncio.create_task(ask(pool.pin(0), 2))
        await engine.wait_until(lambda: prompts(engine).count(2) == 2)
        engine.is_failing = False
        await turn


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_an_engine_that_is_busy_is_asked_until_patience_ends(status: int) -> None:
    """It asked for pauses, and no request of it was lost: more of them than a lost one would survive."""
    async with versioned_engine() as engine, pool_of(engine, patience_s=5.0) as pool:
        engine.busy = [(status, "0.01")] * (MAX_LOST + 3)
        await ask(pool.pin(0), 1)
        assert not engine.busy
        engine.busy = [(status, "60")]
        with pytest.raises(
            EngineError, match=rf"{engine.url}.*HTTP {status}: busy; it asks to be left alone"
        ):
            await ask(pool.pin(0), 2)


async def test_a_request_never_waits_longer_for_an_engine_than_patience_lasts() -> None:
    """Every engine asks to be left alone for an hour: also later requests fail, and say so."""
    async with (
        versioned_engine() as a,
        versioned_engine() as b,
        pool_of(a, b, patience_s=5.0) as pool,
    ):
        for engine in (a, b):
            engine.busy = [(429, "3600")]
        said = (
            r"HTTP 429: busy; it asks to be left alone for 3600 s, and a request waits for an engine "
            r"for at most 5 s \(engine\.patience_s\)"
        )
        async with asyncio.timeout(30):
            for number in range(3):
                with pytest.raises(EngineError, match=rf"{a.url}.*{said}"):
                    await ask(pool.pin(0), number)
    assert (prompts(a), prompts(b)) == ([0], [0])


async def test_an_engine_that_asks_for_an_endless_pause_is_asked_again() -> None:
    async with versioned_engine() as engine, pool_of(engine) as pool:
        engine.busy = [(503, "inf"), (503, "nan")]
        await ask(pool.pin(0), 1)
    assert prompts(engine) == [1, 1, 1]


async def test_a_rollout_moves_away_from_an_engine_that_asks_to_be_left_alone() -> None:
    async with (
        versioned_engine() as a,
        versioned_engine() as b,
        pool_of(a, b, patience_s=5.0) as pool,
    ):
        a.busy = [(503, "3600")]
        await ask(pool.pin(0), 0)
        await ask(pool.pin(0), 1)
    assert (prompts(a), prompts(b)) == ([0], [0, 1])


async def test_a_pause_after_a_loss_ends_with_the_patience_of_the_request() -> None:
    """The fourth pause would last until 3.75 s. The request asks again when its patience ends."""
    async with versioned_engine() as engine, pool_of(engine, patience_s=2.0) as pool:
        engine.version_status = 503
        with pytest.raises(EngineError, match=r"HTTP 503.*; waited 2\.\d s for an engine"):
            await ask(pool.pin(0), 0)


async def test_a_pause_before_the_first_try_counts_as_waiting() -> None:
    async with versioned_engine() as engine, pool_of(engine, patience_s=0.5) as pool:
        engine.busy = [(503, "0.7")] * 2
        with pytest.raises(EngineError, match=r"for 0\.7 s, .* for at most 0\.5 s"):
            await ask(pool.pin(0), 1)
        pool.patience_s = 1.0
        with pytest.raises(EngineError, match=r"for 0\.7 s, .* for at most 1 s"):
            await ask(pool.pin(0), 2)
        assert prompts(engine) == [1, 2], "two pauses are longer than its patience"


async def test_a_client_that_refuses_an_engine_drops_only_its_own_requests() -> None:
    async with versioned_engine() as a, versioned_engine() as b, pool_of(a, b) as pool:
        mine, theirs = ExpectedPolicy(), ExpectedPolicy()
        for policy in (mine, theirs):
            pool.obey(policy)
        a.stalls = True
        moving = asyncio.create_task(ask(pool.pin(0, mine), 1))
        staying = asyncio.create_task(ask(pool.pin(0, theirs), 2))
        await a.wait_until(lambda: len(prompts(a)) == 2)
        mine.refuse([a.url])
        assert (await moving).engine == b.url
        assert prompts(b) == [1]
        assert not staying.done()
        theirs.refuse([a.url])
        assert (await staying).engine == b.url


async def test_what_a_client_expects_of_an_engine_keeps_no_other_client_from_it() -> None:
    """A version that no engine has makes requests of its own client wait, and those of no other."""
    async with (
        versioned_engine() as a,
        versioned_engine() as b,
        pool_of(a, b, patience_s=1.0) as pool,
    ):
        wrong = ExpectedPolicy()
        wrong.version = 999
        wrong.refuse([b.url])
        with pytest.raises(EngineError, match="has version '0', not 999 yet; waited"):
            await ask(pool.pin(0, wrong), 1)
        await ask(pool.pin(0), 2)
    assert (prompts(a), prompts(b)) == ([2], [])


async def test_an_engine_that_stops_in_the_middle_of_a_reply_costs_only_itself() -> None:
    """All places for large bodies of the first engine are taken. The second one answers, also with large
    bodies."""
    async with versioned_engine() as a, versioned_engine() as b, pool_of(a, b) as pool:
        a.stalls, b.padding = True, 2 * INLINE_BODY_BYTES
        stuck = [asyncio.create_task(ask(pool.pin(0), n)) for n in range(4)]
        await a.wait_until(lambda: len(prompts(a)) == 4)
        async with asyncio.timeout(
            IDLE_S / 2
        ):  # after IDLE_S the first engine's replies are given up
            for n in range(10, 20):
                await ask(pool.pin(1), n)
        assert not any(task.done() for task in stuck)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)


async def test_an_engine_that_went_away_is_asked_by_one_request_until_it_answers() -> None:
    async with versioned_engine() as a, versioned_engine() as b, pool_of(a, b) as pool:
        a.busy, a.stalls = [(503, "0")], True
        first = asyncio.create_task(ask(pool.pin(0), 0))
        await a.wait_until(lambda: len(prompts(a)) == 2)  # and now it is silent
        async with asyncio.timeout(IDLE_S / 2):
            await asyncio.gather(*(ask(pool.pin(0), n) for n in range(10, 16)))
        assert not first.done()
        assert (prompts(a), len(prompts(b))) == ([0, 0], 6)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        a.stalls = False
        await ask(pool.pin(0), 1)
        await asyncio.gather(*(ask(pool.pin(0), n) for n in range(20, 26)))
    assert len(prompts(a)) == 2 + 1 + 6


async def test_a_reply_that_is_larger_than_any_right_one_is_refused() -> None:
    rules = ReplyRules(wants_routes=False, shape=ModelShape(num_layers=2, vocab_size=100))
    assert rules.most_bytes(10) < 2 << 20
    async with versioned_engine() as engine, pool_of(engine, rules=rules) as pool:
        engine.padding = 3 << 20
        with pytest.raises(EngineError, match=r"its reply has .* bytes"):
            await ask(pool.pin(0), 1)
        engine.padding = 0
        await ask(pool.pin(0), 2)


async def test_a_window_that_the_run_file_promises_and_the_engine_does_not_have() -> None:
    async with versioned_engine(max_model_len=64) as engine:
        access = EngineAccess(engine.url, 30.0)
        config = PoolConfig(engines=(access,), rules=RULES, patience_s=1.0, max_context=65)
        with pytest.raises(ConfigError, match=r"max_context is 65, .* takes 64 tokens"):
            await open_pool(config, ExpectedPolicy(), None, is_patient=False).__aenter__()
        async with pool_of(engine) as pool:
            assert pool.pin(0).max_context == 64


async def test_at_the_start_every_engine_must_answer_and_serve_the_same_model() -> None:
    async with (
        versioned_engine() as a,
        versioned_engine(model="other") as b,
        versioned_engine() as c,
    ):
        with pytest.raises(
            EngineError, match=f"the engine at {a.url} serves 'm' .* {b.url} 'other'"
        ):
            await pool_of(a, b).__aenter__()
        await c.stop()
        with pytest.raises(EngineAway, match=f"no engine at {c.url}"):
            await pool_of(a, c).__aenter__()


async def test_a_patient_pool_waits_for_one_engine_that_answers() -> None:
    async with versioned_engine() as a, versioned_engine() as b:
        await a.stop()
        async with pool_of(a, b, is_patient=True) as pool:
            await ask(pool.pin(0), 0)
        await b.stop()
        async with AsyncExitStack() as stack:
            opened = stack.enter_async_context(pool_of(a, b, is_patient=True))
            opening = asyncio.create_task(opened)
            await a.start("0")
            await ask((await opening).pin(1), 1)
        await a.stop()
        with pytest.raises(EngineError, match=r"waited [\d.]+ s"):
            await pool_of(a, b, patience_s=0.1, is_patient=True).__aenter__()
    assert (prompts(a), prompts(b)) == ([1], [0])


async def test_a_patient_pool_passes_over_an_engine_that_never_answers() -> None:
    async with versioned_engine() as silent, versioned_engine() as other:
        silent.may_answer.clear()
        with pytest.raises(EngineLate, match=f"{silent.url}: no answer within 0.1 s"):
            await pool_of(silent, deadline_s=0.1).__aenter__()
        with pytest.raises(EngineError, match=r"no answer within 0\.1 s; waited [\d.]+ s"):
            await pool_of(
                silent, deadline_s=0.1, patience_s=0.1, is_patient=True
            ).__aenter__()
        async with pool_of(silent, other, deadline_s=0.1, is_patient=True) as pool:
            await ask(pool.pin(1), 0)
