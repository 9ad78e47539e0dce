"""A run or an evaluation whose first rollouts nearly all fail in the same way has no chance."""

from tests.orchestrator.builders import scored

from rollway.observe.upkeep import is_worth_a_line
from rollway.orchestrator.shell.failure_counts import FailureCounts
from rollway.records.first_rollouts import (
    DISK_FULL,
    FIRST_LOST,
    FIRST_ROLLOUTS,
    FirstRollouts,
)
from rollway.records.rollout import Cancelled, Failed, Outcome


def watch(outcomes: list[Outcome]) -> str:
    first = FirstRollouts()
    for outcome in outcomes:
        first.settled(outcome)
    return first.reason


def raised(task: int) -> Failed:
    return Failed("scorer", f"KeyError: 'task {task}'", where="shop.py:3 in Shop.exact")


def test_failures_at_one_line_are_summed_up_whatever_they_say() -> None:
    failures: list[Outcome] = [raised(task) for task in range(FIRST_ROLLOUTS)]
    assert watch(failures[:-1]) == "", "not before there are enough"
    assert watch(failures) == (
        f"{FIRST_ROLLOUTS} of the first {FIRST_ROLLOUTS} rollouts failed in the same way: scorer: "
        "KeyError: 'task 0', at shop.py:3 in Shop.exact"
    )
    assert watch([Cancelled("too old"), *failures[:-1]]) == "", "cancelled ones do not count"


def test_failures_without_a_line_are_told_apart_by_their_words() -> None:
    late: list[Outcome] = [
        Failed("engine", f"no answer for {n} s") for n in range(FIRST_ROLLOUTS)
    ]
    assert "no answer for 0 s" in watch(late)
    mixed: list[Outcome] = [
        Failed("engine", "x" * (n % 2 + 1)) for n in range(FIRST_ROLLOUTS)
    ]
    assert watch(mixed) == ""


def test_a_run_with_some_good_rollouts_goes_on() -> None:
    good: list[Outcome] = [scored(0.5, 0) for _ in range(FIRST_ROLLOUTS // 8)]
    bad: list[Outcome] = [raised(task) for task in range(FIRST_ROLLOUTS)]
    assert watch([*good, *bad]) == ""
    assert watch([*good, *bad, *bad, *bad]) == "", "only the first ones are looked at"


def test_rollouts_that_all_end_their_worker_are_fewer_until_it_stops() -> None:
    lost: list[Outcome] = [
        Failed("worker", f"worker {n} was ended by SIGSEGV", where="shop.py:3 in Shop.exact")
        for n in range(FIRST_ROLLOUTS)
    ]
    assert watch(lost[: FIRST_LOST - 1]) == ""
    assert f"{FIRST_LOST} of the first {FIRST_LOST} rollouts" in watch(lost)
    assert watch([scored(0.5, 0), *lost[:FIRST_LOST]]) == "", (
        "one that ended well: the rest may"
    )
    assert f"{FIRST_ROLLOUTS - 1} of the first" in watch([scored(0.5, 0), *lost])


def test_rollouts_that_failed_for_lack_of_disk_say_nothing_about_the_others() -> None:
    full: list[Outcome] = [
        Failed("worker", f"cannot write 10 bytes to /run: {words}; make room")
        for words in DISK_FULL * FIRST_ROLLOUTS
    ]
    assert watch(full) == ""
    assert "KeyError" in watch([*full, *map(raised, range(FIRST_ROLLOUTS))])
    own: list[Outcome] = [Failed("env", DISK_FULL[0])] * FIRST_ROLLOUTS
    assert DISK_FULL[0] in watch(own), "an error of the environment's own code counts"


def test_failures_are_counted_by_environment_and_cause() -> None:
    counts = FailureCounts()
    told = []
    for task in range(120):
        if is_worth_a_line(count := counts.next_count("shop", raised(task))):
            told.append(count)
        counts.add("shop", raised(task))
    counts.add("shop", Failed("engine", "gone"))
    assert told == [1, 10, 100]
    assert (counts.total("shop"), counts.total("other")) == (121, 0)
    assert counts.commonest("shop").startswith(
        "120 × scorer: KeyError: 'task 0', at shop.py:3"
    )
    assert counts.commonest("other") == ""
