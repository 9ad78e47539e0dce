"""Which worker gets the next rollout."""

from hypothesis import given
from hypothesis import strategies as st

from rollway.envserver.core.worker_pool import BIG_BYTES, WorkerPool
from rollway.records.ids import RolloutId, WorkerName
from rollway.records.lag import LagStats, ProcessStats

A, B, C = WorkerName("a"), WorkerName("b"), WorkerName("c")


def pool_of(**credits: int) -> WorkerPool:
    pool = WorkerPool()
    for name, count in credits.items():
        pool.add(WorkerName(name), count)
    return pool


def fill(pool: WorkerPool, name: WorkerName, count: int) -> None:
    for n in range(count):
        pool.give(name, RolloutId(f"{name}{n}"))


def note(
    pool: WorkerPool, name: WorkerName, p99_s: float = 0.001, rss: int = 100 << 20
) -> None:
    for _ in range(8):
        pool.note(name, ProcessStats(name, LagStats(p99=p99_s), rss))


def test_most_room_wins_then_least_lag_then_least_memory() -> None:
    pool = pool_of(a=4, b=4, c=4)
    fill(pool, A, 1)
    note(pool, B, p99_s=0.02)
    note(pool, C, p99_s=0.01)
    assert pool.freest(1) == C
    note(pool, C, p99_s=0.02, rss=200 << 20)
    assert pool.freest(1) == B
    fill(pool, B, 2)
    fill(pool, C, 2)
    assert pool.freest(1) == A


def test_workers_that_are_full_draining_or_being_killed_get_nothing() -> None:
    pool = pool_of(a=1, b=2, c=2)
    fill(pool, A, 1)
    pool.drain(B)
    pool.mark_for_kill(C)
    assert pool.freest(1) is None
    assert WorkerPool().freest(1) is None


def test_a_worker_far_later_or_far_bigger_than_the_others_gets_less() -> None:
    pool = pool_of(a=8, b=8, c=8)
    for name in (A, B, C):
        note(pool, name)
    note(pool, A, p99_s=0.5)
    note(pool, B, rss=BIG_BYTES * 4)
    limits = {name: worker.limit for name, worker in pool.open.items()}
    assert limits == {"a": 4, "b": 4, "c": 8}
    note(pool, A)
    note(pool, B)
    assert [worker.limit for worker in pool.open.values()] == [8, 8, 8]


def test_a_single_worker_is_never_late() -> None:
    pool = pool_of(a=8)
    note(pool, A, p99_s=9.0, rss=BIG_BYTES * 9)
    assert pool.open[A].limit == 8


def test_a_group_waits_for_room_in_one_worker() -> None:
    pool = pool_of(a=4, b=4)
    fill(pool, A, 2)
    fill(pool, B, 1)
    assert pool.freest(3) == B
    assert pool.freest(4) is None


def test_a_group_larger_than_any_worker_goes_to_an_empty_one() -> None:
    pool = pool_of(a=4, b=4)
    fill(pool, A, 1)
    assert pool.freest(9) == B
    fill(pool, B, 1)
    assert pool.freest(9) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 8), st.booleans()), min_size=1, max_size=6
    ),
    st.integers(1, 8),
)
def test_the_chosen_worker_has_room_and_no_other_has_more(
    workers: list[tuple[int, int, bool]], size: int
) -> None:
    pool = WorkerPool()
    for n, (credits, running, drains) in enumerate(workers):
        name = WorkerName(f"w{n}")
        pool.add(name, credits)
        fill(pool, name, min(credits, running))
        if drains:
            pool.drain(name)
    chosen = pool.freest(size)
    rooms = {name: worker.room() for name, worker in pool.open.items()}
    if chosen is None:
        assert all(room < size for room in rooms.values())
    else:
        assert rooms[chosen] == max(rooms.values())
        too_large = size > max(worker.limit for worker in pool.open.values())
        assert rooms[chosen] >= size or (too_large and not pool.open[chosen].running)
