"""What waits for a worker: in order, by turns, and cheap however much it is."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollway.envserver.core.run_queue import RunQueue
from rollway.records.ids import RolloutId


def keys(*names: str) -> list[RolloutId]:
    return [RolloutId(name) for name in names]


def drained(waiting: RunQueue) -> list[list[RolloutId]]:
    return [waiting.take() for _ in iter(waiting.next_size, 0)]


def test_clients_take_turns() -> None:
    waiting = RunQueue()
    for name in ("a1", "a2", "a3"):
        waiting.add(b"a", keys(name))
    waiting.add(b"b", keys("b1", "b2"))
    waiting.add(b"b", keys("b3"))
    assert drained(waiting) == [["a1"], ["b1", "b2"], ["a2"], ["b3"], ["a3"]]
    assert len(waiting) == waiting.count(b"a") == 0


def test_what_comes_back_is_first() -> None:
    waiting = RunQueue()
    waiting.add(b"a", keys("a1"))
    waiting.add(b"a", keys("lost"), first=True)
    assert drained(waiting) == [["lost"], ["a1"]]


def test_a_group_shrinks_and_disappears() -> None:
    waiting = RunQueue()
    waiting.add(b"a", keys("x", "y"))
    assert waiting.remove(RolloutId("x"))
    assert not waiting.remove(RolloutId("x"))
    assert (waiting.next_size(), waiting.count(b"a")) == (1, 1)
    assert waiting.remove(RolloutId("y"))
    assert waiting.next_size() == 0


ACTS = st.tuples(
    st.sampled_from(["add", "first", "remove", "take"]), st.sampled_from([b"a", b"b"]), st.integers(0, 9)
)


@given(st.lists(ACTS, max_size=60))
def test_it_agrees_with_plain_lists(acts: list[Any]) -> None:
    waiting, queues, turns = RunQueue(), {b"a": [], b"b": []}, []  # type: ignore[var-annotated]
    for number, (act, client, at) in enumerate(acts):
        if act in ("add", "first"):
            unit = keys(*(f"{number}.{member}" for member in range(1 + at % 3)))
            waiting.add(client, unit, first=act == "first")
            queues[client].insert(0 if act == "first" else len(queues[client]), list(unit))
            if client not in turns:
                turns.append(client)
        elif act == "remove":
            there = [key for unit in queues[client] for key in unit]
            key = there[at % len(there)] if there else RolloutId("nobody")
            assert waiting.remove(key) == bool(there)
            queues[client] = [left for unit in queues[client] if (left := [k for k in unit if k != key])]
        elif turns:
            first = turns.pop(0)
            assert waiting.next_size() == len(queues[first][0])
            assert waiting.take() == queues[first].pop(0)
            turns.append(first)
        turns = [one for one in turns if queues[one]]
        for one, queue in queues.items():
            assert waiting.count(one) == sum(len(unit) for unit in queue)
        assert len(waiting) == sum(waiting.count(one) for one in queues)
