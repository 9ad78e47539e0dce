"""Rows reproduce exactly what the engine saw; routes equal a naive quadratic merge, byte for byte."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.errors import TraceError
from rollway.records.turn import Ints, Turn
from rollway.trace.row import NOT_SAMPLED, Row
from rollway.trace.trace import Trace

LAYERS, TOPK = 2, 3


def routes_start(trace: Trace, prompt_ids: Ints) -> int:
    with trace.place_for(prompt_ids) as place:
        return place.routes_start


def turn(
    prompt: list[int],
    completion: list[int],
    *,
    routes: Any = None,
    start: int = 0,
    version: int = 0,
) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=-np.arange(1, len(completion) + 1, dtype=np.float32),
        versions=np.full(len(completion), version, np.int32),
        temperature=0.7,
        finish_reason="stop",
        routes=routes,
        routes_start=start,
    )


def joined(row: Row, name: str) -> Any:
    return np.concatenate(row.columns()[name])


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[int, list[int], list[int], bool]]:
    """Turns of interleaved agents: (agent, new prompt ids, completion ids, history compacted).

    Each agent begins with a different token, so that no agent's row is a prefix of another's.
    """
    ids = st.lists(st.integers(10, 500), min_size=1, max_size=6)
    return draw(
        st.lists(
            st.tuples(st.integers(0, 2), ids, ids, st.booleans()),
            min_size=1,
            max_size=12,
        )
    )


def naive_rows(turns: list[Turn], full_routes: list[Any]) -> list[dict[str, Any]]:
    """Build the rows in the simplest way: compare lists, and rebuild arrays at every turn."""
    rows: list[dict[str, Any]] = []
    for turn, routes in zip(turns, full_routes, strict=True):
        prompt, sampled = turn.prompt_ids.tolist(), turn.completion_ids.tolist()
        fits = [row for row in rows if prompt[: len(row["ids"])] == row["ids"]]
        row = max(fits, key=lambda row: len(row["ids"]), default=None)
        if row is None:
            row = {"ids": [], "mask": [], "routes": routes[:0]}
            rows.append(row)
        num_known = max(0, len(row["ids"]) - 1)
        row["mask"] = row["mask"] + [0] * (len(prompt) - len(row["ids"])) + [1] * len(sampled)
        row["ids"] = prompt + sampled
        last = np.zeros((1, LAYERS, TOPK), routes.dtype)
        row["routes"] = np.concatenate([row["routes"][:num_known], routes[num_known:], last])
    return rows


@given(conversations(), st.sampled_from([np.uint8, np.uint16]), st.booleans(), st.randoms())
def test_rows_and_routes_equal_a_naive_merge(
    talk: list[tuple[int, list[int], list[int], bool]], dtype: Any, delta: bool, random: Any
) -> None:
    trace, turns, all_routes = Trace(), [], []
    history: dict[int, list[int]] = {}
    for agent, new, drawn, compact in talk:
        prompt = ([agent] if compact or agent not in history else history[agent]) + new
        history[agent] = prompt + drawn
        shape = (len(prompt) + len(drawn) - 1, LAYERS, TOPK)
        top = 255 if dtype == np.uint8 else 65535
        rng = np.random.default_rng(random.getrandbits(32))
        routes = rng.integers(0, top, shape, dtype, endpoint=True)
        start = routes_start(trace, np.array(prompt, np.int32)) if delta else 0
        turns.append(turn(prompt, drawn, routes=routes[start:], start=start))
        trace.add(turns[-1])
        all_routes.append(routes)
    expected = naive_rows(turns, all_routes)
    rows = trace.finish()
    assert len(rows) == len(expected)
    for row, naive in zip(rows, expected, strict=True):
        assert joined(row, "token_ids").tolist() == naive["ids"]
        assert joined(row, "loss_mask").tolist() == naive["mask"]
        assert joined(row, "routes").tobytes() == naive["routes"].tobytes()
        assert joined(row, "routes").dtype == dtype
        assert row.num_tokens == len(naive["ids"])
        assert row.num_trainable == sum(naive["mask"])
    sampled = [token for turn in turns for token in turn.completion_ids.tolist()]
    trained = [
        token
        for row in rows
        for token, on in zip(joined(row, "token_ids"), joined(row, "loss_mask"), strict=True)
        if on
    ]
    assert sorted(trained) == sorted(sampled), "every sampled token is trained exactly once"


@st.composite
def family_talks(draw: st.DrawFn) -> list[tuple[int, int, list[int], list[int], bool]]:
    """Turns of agents that fork from each other and compact their history:
    (earlier turn to continue, tokens of it kept, new prompt ids, completion ids, delta routes)."""
    ids = st.lists(
        st.integers(0, 3), min_size=1, max_size=4
    )  # few ids, so that prefixes are also equal by chance
    keep = st.one_of(st.just(10_000), st.integers(0, 6))
    turns = st.tuples(st.integers(-1, 11), keep, ids, ids, st.booleans())
    return draw(st.lists(turns, min_size=1, max_size=12))


@given(family_talks(), st.randoms())
def test_forks_and_compaction_reproduce_what_the_engine_saw(
    talk: list[tuple[int, int, list[int], list[int], bool]], random: Any
) -> None:
    """Children share their parent's history, histories are cut anywhere, and the engine sends all
    routes or only new ones. The result equals the naive merge, byte for byte."""
    trace, turns, all_routes = Trace(), [], []
    requests: list[list[int]] = []
    for parent, kept, new, drawn, delta in talk:
        prompt = (
            requests[parent % len(requests)][:kept] if requests and parent >= 0 else []
        ) + new
        requests.append(prompt + drawn)
        rng = np.random.default_rng(random.getrandbits(32))
        shape = (len(prompt) + len(drawn) - 1, LAYERS, TOPK)
        routes = rng.integers(0, 255, shape, np.uint8, endpoint=True)
        start = routes_start(trace, np.array(prompt, np.int32)) if delta else 0
        turns.append(turn(prompt, drawn, routes=routes[start:], start=start))
        trace.add(turns[-1])
        all_routes.append(routes)
    rows = trace.finish()
    for row, naive in zip(rows, naive_rows(turns, all_routes), strict=True):
        assert joined(row, "token_ids").tolist() == naive["ids"]
        assert joined(row, "loss_mask").tolist() == naive["mask"]
        assert joined(row, "routes").tobytes() == naive["routes"].tobytes()
    texts = [joined(row, "token_ids").tolist() for row in rows]
    for request in requests:
        assert any(text[: len(request)] == request for text in texts), (
            "every request begins a row"
        )
    assert sum(row.num_trainable for row in rows) == sum(
        len(turn.completion_ids) for turn in turns
    )


def test_columns_of_two_turns() -> None:
    trace = Trace()
    trace.add(turn([1, 2], [3, 4], version=5))
    trace.add(turn([1, 2, 3, 4, 9], [6], version=7))
    (row,) = trace.finish()
    assert joined(row, "token_ids").tolist() == [1, 2, 3, 4, 9, 6]
    assert joined(row, "loss_mask").tolist() == [0, 0, 1, 1, 0, 1]
    assert joined(row, "logprobs").tolist() == [0, 0, -1, -2, 0, -1]
    assert joined(row, "versions").tolist() == [
        NOT_SAMPLED,
        NOT_SAMPLED,
        5,
        5,
        NOT_SAMPLED,
        7,
    ]
    assert row.columns().keys() == {
        "token_ids",
        "loss_mask",
        "logprobs",
        "temperatures",
        "versions",
    }


def test_a_turn_extends_the_longest_row_that_fits() -> None:
    trace = Trace()
    trace.add(turn([1], [2]))
    trace.add(turn([1, 7], [3]))  # it does not begin with [1, 2], so it is another row
    trace.add(turn([1, 2, 5], [6]))
    trace.add(turn([1, 2, 5, 6, 8], [9]))
    rows = trace.finish()
    assert [joined(row, "token_ids").tolist() for row in rows] == [
        [1, 2, 5, 6, 8, 9],
        [1, 7, 3],
    ]


def test_a_prompt_that_is_not_contiguous_finds_its_row() -> None:
    trace = Trace()
    trace.add(turn([1, 2], [3]))
    every_second = np.array([1, 9, 2, 9, 3, 9, 4, 9], np.int32)[::2]
    with trace.place_for(every_second) as place:
        assert place.routes_start == 2
    trace.add(msgspec.structs.replace(turn([], [5]), prompt_ids=every_second))
    assert [joined(row, "token_ids").tolist() for row in trace.finish()] == [[1, 2, 3, 4, 5]]


def test_routes_are_requested_from_the_last_token_of_the_row() -> None:
    trace = Trace()
    assert routes_start(trace, np.array([1, 2], np.int32)) == 0
    routes = np.zeros((3, LAYERS, TOPK), np.uint8)
    trace.add(turn([1, 2], [3, 4], routes=routes))
    assert routes_start(trace, np.array([1, 2, 3, 4, 5], np.int32)) == 3
    assert routes_start(trace, np.array([1, 9], np.int32)) == 0


ROUTES = np.zeros((3, LAYERS, TOPK), np.uint8)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (turn([1, 2], [3, 4], routes=ROUTES[:2]), "routes of 2 tokens"),
        (
            turn([1, 2], [3, 4], routes=ROUTES[1:], start=1),
            "start at position 1",
        ),
        (turn([1, 2], [3, 4], routes=ROUTES.astype(np.int32)), "int32"),
        (turn([1, 2], [3, 4], routes=ROUTES[:, 0]), r"\[3, 3\]"),
    ],
)
def test_routes_that_cannot_be_right_are_refused(bad: Turn, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Trace().add(bad)


def test_a_turn_without_the_routes_of_its_row_is_refused() -> None:
    trace = Trace()
    trace.add(turn([1, 2], [3, 4], routes=ROUTES))
    with pytest.raises(
        TraceError, match="has no routes, but earlier turns of its row had them"
    ):
        trace.add(turn([1, 2, 3, 4, 5], [6]))


def test_a_wrong_number_of_logprobs_is_refused() -> None:
    good = turn([1], [2, 3])
    bad = Turn(
        good.prompt_ids, good.completion_ids, good.logprobs[:1], good.versions, 1.0, "stop"
    )
    with pytest.raises(TraceError, match="1 logprobs"):
        Trace().add(bad)
