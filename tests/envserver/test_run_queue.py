"""The queue of rollouts that wait for a worker: its order, and how clients alternate."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollway.envserver.core.run_queue import RunQueue
from rollway.records.ids import RolloutId


def keys(*names: str) -> list[RolloutId]:
    return [RolloutId(name) for name in names]


def drained(queue: RunQueue) -> list[list[RolloutId]]:
    return [queue.take() for _ in iter(queue.next_size, 0)]


def test_clients_alternate() -> None:
    queue = RunQueue()
    for name in ("a1", "a2", "a3"):
        queue.add(b"a", keys(name))
    queue.add(b"b", keys("b1", "b2"))
    queue.add(b"b", keys("b3"))
    assert drained(queue) == [["a1"], ["b1", "b2"], ["a2"], ["b3"], ["a3"]]
    assert len(queue) == queue.count(b"a") == 0


def test_lost_rollouts_are_first() -> None:
    queue = RunQueue()
    queue.add(b"a", keys("a1"))
    queue.add(b"a", keys("lost"), first=True)
    assert drained(queue) == [["lost"], ["a1"]]


def test_a_group_shrinks_and_disappears_as_its_members_are_removed() -> None:
    queue = RunQueue()
    queue.add(b"a", keys("x", "y"))
    assert queue.remove(RolloutId("x"))
    assert not queue.remove(RolloutId("x"))
    assert (queue.next_size(), queue.count(b"a")) == (1, 1)
    assert queue.remove(RolloutId("y"))
    assert queue.next_size() == 0


ACTS = st.tuples(
    st.sampled_from(["add", "first", "remove", "take"]),
    st.sampled_from([b"a", b"b"]),
    st.integers(0, 9),
)


@given(st.lists(ACTS, max_size=60))
def test_it_agrees_with_plain_lists(acts: list[Any]) -> None:
    queue, queues, order = RunQueue(), {b"a": [], b"b": []}, []  # type: ignore[var-annotated]
    for number, (act, client, at) in enumerate(acts):
        if act in ("add", "first"):
            unit = keys(*(f"{number}.{member}" for member in range(1 + at % 3)))
            queue.add(client, unit, first=act == "first")
            queues[client].insert(0 if act == "first" else len(queues[client]), list(unit))
            if client not in order:
                order.append(client)
        elif act == "remove":
            there = [key for unit in queues[client] for key in unit]
            key = there[at % len(there)] if there else RolloutId("unknown")
            assert queue.remove(key) == bool(there)
            queues[client] = [
                left for unit in queues[client] if (left := [k for k in unit if k != key])
            ]
        elif order:
            first = order.pop(0)
            assert queue.next_size() == len(queues[first][0])
            assert queue.take() == queues[first].pop(0)
            order.append(first)
        order = [client for client in order if queues[client]]
        for client, units in queues.items():
            assert queue.count(client) == sum(len(unit) for unit in units)
        assert len(queue) == sum(queue.count(client) for client in queues)
