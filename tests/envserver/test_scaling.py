"""How many workers there should be."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollway.envserver.core.scaling import PRESSED_S, Scaling, WorkerLoad
from rollway.records.ids import WorkerName


def load(
    waiting: int = 0, *, full: bool = False, up: int = 1, idle: tuple[str, ...] = ()
) -> WorkerLoad:
    return WorkerLoad(waiting, full, up, 4, tuple(WorkerName(name) for name in idle))


def test_places_are_opened_only_after_work_has_waited_for_seconds() -> None:
    scaling = Scaling(1, 4, idle_s=10.0)
    assert scaling.num_to_open(0.0, load(6, full=True)) == 0
    assert scaling.num_to_open(PRESSED_S - 0.1, load(6, full=True)) == 0
    assert scaling.num_to_open(PRESSED_S, load(6, full=True)) == 2
    assert scaling.num_places == 3


def test_a_pause_starts_the_wait_again() -> None:
    scaling = Scaling(1, 4, idle_s=10.0)
    scaling.num_to_open(0.0, load(6, full=True))
    scaling.num_to_open(1.0, load(0))
    assert scaling.num_to_open(PRESSED_S, load(6, full=True)) == 0
    assert scaling.num_to_open(2 * PRESSED_S, load(6, full=True)) == 2


def test_no_place_is_opened_above_the_most_or_while_workers_are_starting() -> None:
    scaling = Scaling(1, 2, idle_s=10.0)
    scaling.num_to_open(0.0, load(100, full=True))
    assert scaling.num_to_open(PRESSED_S, load(100, full=True)) == 1
    for second in range(20):
        assert scaling.num_to_open(PRESSED_S + second, load(100, full=True, up=1)) == 0
        assert scaling.num_to_open(PRESSED_S + second, load(100, full=True, up=2)) == 0


def test_idle_workers_retire_last_names_first_and_the_least_stay() -> None:
    scaling = Scaling(1, 3, idle_s=10.0)
    scaling.num_places = 3
    all_idle = load(up=3, idle=("w0", "w1", "w2"))
    assert scaling.to_retire(0.0, all_idle) == []
    assert scaling.to_retire(9.9, all_idle) == []
    assert scaling.to_retire(10.0, all_idle) == ["w2", "w1"]
    assert scaling.to_retire(30.0, load(up=1, idle=("w0",))) == []


def test_a_worker_that_worked_in_between_is_not_idle() -> None:
    scaling = Scaling(1, 2, idle_s=10.0)
    scaling.num_places = 2
    scaling.to_retire(0.0, load(up=2, idle=("w0", "w1")))
    scaling.to_retire(5.0, load(up=2, idle=("w0",)))
    assert scaling.to_retire(10.0, load(up=2, idle=("w0", "w1"))) == ["w0"]


SECONDS = st.lists(
    st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 5), st.integers(0, 5)),
    max_size=60,
)


@given(SECONDS, st.integers(1, 3), st.integers(0, 3))
def test_the_number_of_places_is_always_between_least_and_most(
    seconds: list[Any], least: int, more: int
) -> None:
    scaling = Scaling(least, least + more, idle_s=2.0)
    for now_s, (waiting, full, up, idle) in enumerate(seconds):
        names = tuple(f"w{n}" for n in range(min(up, idle)))
        now = load(waiting, full=full, up=min(up, scaling.num_places), idle=names)
        opened = scaling.num_to_open(float(now_s), now)
        closed = scaling.to_retire(float(now_s), now)
        assert not (opened and closed)
        assert least <= scaling.num_places <= least + more
