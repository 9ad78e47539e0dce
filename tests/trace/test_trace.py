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
    prompt: list[int], completion: list[int], *, routes: Any = None, start: int = 0, version: int = 0
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

    Agents have first tokens of their own, so that no agent's row is another's prefix.
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
    """The same by the book: whole prefixes compared as lists, whole arrays rebuilt at every turn."""
    rows: list[dict[str, Any]] = []
    for one, routes in zip(turns, full_routes, strict=True):
        prompt, drawn = one.prompt_ids.tolist(), one.completion_ids.tolist()
        fits = [row for row in rows if prompt[: len(row["ids"])] == row["ids"]]
        row = max(fits, key=lambda row: len(row["ids"]), default=None)
        if row is None:
            row = {"ids": [], "mask": [], "routes": routes[:0]}
            rows.append(row)
        known = max(0, len(row["ids"]) - 1)
        row["mask"] = row["mask"] + [0] * (len(prompt) - len(row["ids"])) + [1] * len(drawn)
        row["ids"] = prompt + drawn
        last = np.zeros((1, LAYERS, TOPK), routes.dtype)
        row["routes"] = np.concatenate([row["routes"][:known], routes[known:], last])
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
        one = turn(prompt, drawn, routes=routes[start:], start=start)
        trace.add(one)
        turns.append(one)
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
    sampled = [token for one in turns for token in one.completion_ids.tolist()]
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
    (earlier turn to go on from, tokens of it kept, new prompt ids, completion ids, delta routes)."""
    ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)  # few ids: prefixes meet by chance too
    keep = st.one_of(st.just(10_000), st.integers(0, 6))
    one = st.tuples(st.integers(-1, 11), keep, ids, ids, st.booleans())
    return draw(st.lists(one, min_size=1, max_size=12))


@given(family_talks(), st.randoms())
def test_forks_and_compaction_reproduce_what_the_engine_saw(
    talk: list[tuple[int, int, list[int], list[int], bool]], random: Any
) -> None:
    """Children that share their parent's history, siblings, histories cut anywhere, and an engine
    that sends all routes or only new ones as it likes: still the naive merge, byte for byte."""
    trace, turns, all_routes = Trace(), [], []
    said: list[list[int]] = []
    for parent, kept, new, drawn, delta in talk:
        prompt = (said[parent % len(said)][:kept] if said and parent >= 0 else []) + new
        said.append(prompt + drawn)
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
    for seen in said:
        assert any(text[: len(seen)] == seen for text in texts), "a request is a row's beginning"
    assert sum(row.num_trainable for row in rows) == sum(len(one.completion_ids) for one in turns)


@given(conversations(), st.data())
def test_extra_columns_lie_on_the_tokens_they_came_with(
    talk: list[tuple[int, list[int], list[int], bool]], data: st.DataObject
) -> None:
    """Each turn brings any of three columns; every drawn token keeps its value, the rest is filled."""
    trace = Trace()
    history: dict[int, list[int]] = {}
    brought: list[tuple[Turn, dict[str, Any]]] = []
    for agent, new, drawn, compact in talk:
        prompt = ([agent] if compact or agent not in history else history[agent]) + new
        history[agent] = prompt + drawn
        names = data.draw(st.sets(st.sampled_from(["ref_logprobs", "token_weights", "value"])))
        extra = {name: np.arange(len(drawn), dtype=np.float32) + 10 * len(brought) + 2 for name in names}
        one = msgspec.structs.replace(turn(prompt, drawn, version=len(brought)), extra=extra)
        trace.add(one)
        brought.append((one, extra))
    for row in trace.finish():
        versions = joined(row, "versions")
        here = {int(version) for version in versions if version != NOT_SAMPLED}
        assert set(row.extra) == {name for version in here for name in brought[version][1]}
        for name in row.extra:
            column = joined(row, name)
            assert column.dtype == np.float32
            assert set(column[versions == NOT_SAMPLED]) <= {1.0 if name == "token_weights" else 0.0}
            for version in here:
                one, extra = brought[version]
                missing = np.full(len(one.completion_ids), 1 if name == "token_weights" else np.nan)
                np.testing.assert_array_equal(column[versions == version], extra.get(name, missing))


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("ref_logprobs", np.zeros(3, np.float32), r"float32\[3\], expected float32\[2\]"),
        ("ref_logprobs", np.zeros(2, np.float64), "float64"),
        ("logprobs", np.zeros(2, np.float32), "cannot be called 'logprobs'"),
        ("a.b", np.zeros(2, np.float32), "cannot be called"),
    ],
)
def test_extra_columns_that_do_not_fit_are_refused(name: str, column: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        Trace().add(msgspec.structs.replace(turn([1], [2, 3]), extra={name: column}))


def test_columns_of_two_turns() -> None:
    trace = Trace()
    trace.add(turn([1, 2], [3, 4], version=5))
    trace.add(turn([1, 2, 3, 4, 9], [6], version=7))
    (row,) = trace.finish()
    assert joined(row, "token_ids").tolist() == [1, 2, 3, 4, 9, 6]
    assert joined(row, "loss_mask").tolist() == [0, 0, 1, 1, 0, 1]
    assert joined(row, "logprobs").tolist() == [0, 0, -1, -2, 0, -1]
    assert joined(row, "versions").tolist() == [NOT_SAMPLED, NOT_SAMPLED, 5, 5, NOT_SAMPLED, 7]
    assert row.columns().keys() == {"token_ids", "loss_mask", "logprobs", "temperatures", "versions"}


def test_the_longest_row_wins() -> None:
    trace = Trace()
    trace.add(turn([1], [2]))
    trace.add(turn([1, 7], [3]))  # not [1, 2, …]: another row
    trace.add(turn([1, 2, 5], [6]))
    trace.add(turn([1, 2, 5, 6, 8], [9]))
    rows = trace.finish()
    assert [joined(row, "token_ids").tolist() for row in rows] == [
        [1, 2, 5, 6, 8, 9],
        [1, 7, 3],
    ]


def test_a_prompt_that_is_a_view_with_gaps_meets_its_row() -> None:
    trace = Trace()
    trace.add(turn([1, 2], [3]))
    every_second = np.array([1, 9, 2, 9, 3, 9, 4, 9], np.int32)[::2]
    with trace.place_for(every_second) as place:
        assert place.routes_start == 2
    trace.add(msgspec.structs.replace(turn([], [5]), prompt_ids=every_second))
    assert [joined(row, "token_ids").tolist() for row in trace.finish()] == [[1, 2, 3, 4, 5]]


def test_routes_are_asked_from_the_boundary_token_on() -> None:
    trace = Trace()
    assert routes_start(trace, np.array([1, 2], np.int32)) == 0
    routes = np.zeros((3, LAYERS, TOPK), np.uint8)
    trace.add(turn([1, 2], [3, 4], routes=routes))
    assert routes_start(trace, np.array([1, 2, 3, 4, 5], np.int32)) == 3
    assert routes_start(trace, np.array([1, 9], np.int32)) == 0


ROUTES = np.zeros((3, LAYERS, TOPK), np.uint8)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (turn([1, 2], [3, 4], routes=ROUTES[:2]), "routes of 2 tokens"),
        (turn([1, 2], [3, 4], routes=ROUTES[1:], start=1), "start at 1"),
        (turn([1, 2], [3, 4], routes=ROUTES.astype(np.int32)), "int32"),
        (turn([1, 2], [3, 4], routes=ROUTES[:, 0]), r"\[3, 3\]"),
    ],
)
def test_routes_that_cannot_be_right_are_refused(bad: Turn, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        Trace().add(bad)


def test_a_turn_without_the_routes_of_its_row_is_refused() -> None:
    trace = Trace()
    trace.add(turn([1, 2], [3, 4], routes=ROUTES))
    with pytest.raises(TraceError, match="lacks routes"):
        trace.add(turn([1, 2, 3, 4, 5], [6]))


def test_a_wrong_number_of_logprobs_is_refused() -> None:
    good = turn([1], [2, 3])
    bad = Turn(good.prompt_ids, good.completion_ids, good.logprobs[:1], good.versions, 1.0, "stop")
    with pytest.raises(TraceError, match="1 logprobs"):
        Trace().add(bad)
