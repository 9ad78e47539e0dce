"""Which worker is next."""

from hypothesis import given
from hypothesis import strategies as st

from rollway.envserver.core.worker_pool import BIG_BYTES, WorkerPool
from rollway.records.ids import RolloutId, WorkerName
from rollway.records.lag import LagStats, ProcessStats

A, B, C = WorkerName("a"), WorkerName("b"), WorkerName("c")


def pool(**credits: int) -> WorkerPool:
    made = WorkerPool()
    for name, count in credits.items():
        made.add(WorkerName(name), count)
    return made


def fill(made: WorkerPool, name: WorkerName, count: int) -> None:
    for n in range(count):
        made.give(name, RolloutId(f"{name}{n}"))


def say(made: WorkerPool, name: WorkerName, p99_s: float = 0.001, rss: int = 100 << 20) -> None:
    for _ in range(8):
        made.note(name, ProcessStats(name, LagStats(p99=p99_s), rss))


def test_the_one_with_most_room_then_the_most_punctual_then_the_smallest() -> None:
    made = pool(a=4, b=4, c=4)
    fill(made, A, 1)
    say(made, B, p99_s=0.02)
    say(made, C, p99_s=0.01)
    assert made.freest(1) == C
    say(made, C, p99_s=0.02, rss=200 << 20)
    assert made.freest(1) == B
    fill(made, B, 2)
    fill(made, C, 2)
    assert made.freest(1) == A


def test_full_drained_and_condemned_ones_get_nothing() -> None:
    made = pool(a=1, b=2, c=2)
    fill(made, A, 1)
    made.drain(B)
    made.condemn(C)
    assert made.freest(1) is None
    assert WorkerPool().freest(1) is None


def test_one_far_later_or_far_bigger_than_the_others_gets_less() -> None:
    made = pool(a=8, b=8, c=8)
    for name in (A, B, C):
        say(made, name)
    say(made, A, p99_s=0.5)
    say(made, B, rss=BIG_BYTES * 4)
    limits = {name: worker.limit for name, worker in made.open.items()}
    assert limits == {"a": 4, "b": 4, "c": 8}
    say(made, A)
    say(made, B)
    assert [worker.limit for worker in made.open.values()] == [8, 8, 8]


def test_one_alone_is_never_late() -> None:
    made = pool(a=8)
    say(made, A, p99_s=9.0, rss=BIG_BYTES * 9)
    assert made.open[A].limit == 8


def test_a_group_waits_for_room_in_one_place() -> None:
    made = pool(a=4, b=4)
    fill(made, A, 2)
    fill(made, B, 1)
    assert made.freest(3) == B
    assert made.freest(4) is None


def test_a_group_larger_than_any_worker_goes_to_an_empty_one() -> None:
    made = pool(a=4, b=4)
    fill(made, A, 1)
    assert made.freest(9) == B
    fill(made, B, 1)
    assert made.freest(9) is None


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_whoever_is_chosen_has_room_and_nobody_has_more(
    workers: list[tuple[int, int, bool]], size: int
) -> None:
    made = WorkerPool()
    for n, (credits, running, drains) in enumerate(workers):
        name = WorkerName(f"w{n}")
        made.add(name, credits)
        fill(made, name, min(credits, running))
        if drains:
            made.drain(name)
    chosen = made.freest(size)
    rooms = {name: worker.room for name, worker in made.open.items()}
    if chosen is None:
        assert all(room < size for room in rooms.values())
    else:
        assert rooms[chosen] == max(rooms.values())
        too_large = size > max(worker.limit for worker in made.open.values())
        assert rooms[chosen] >= size or (too_large and not made.open[chosen].running)
