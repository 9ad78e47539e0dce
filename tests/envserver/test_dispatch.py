"""Every run is given to a worker and answered once, whatever dies."""

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.doubles.router_core import (
    CLIENT,
    FAILED,
    A,
    B,
    CoreRouter,
    a_group,
    a_run,
    ends_sent,
    runs_sent,
    sent,
    stats,
)

from rollway.envserver.core.blame import MAX_ATTEMPTS
from rollway.envserver.core.dispatch import FramesInTransit
from rollway.envserver.core.events import (
    ClientMessage,
    LogNote,
    RouterCommand,
    RunningCode,
    SendToClient,
    SendToWorker,
    WorkerDied,
    WorkerMessage,
    WorkerSilent,
)
from rollway.records.ids import RolloutId, WorkerName
from rollway.records.rollout import Cancelled, Failed, Settled
from rollway.wire.messages import (
    Cancel,
    FrameTaken,
    Hello,
    Run,
    RunGroup,
    WorkerLost,
)


def test_runs_go_to_the_freest_worker_within_credits() -> None:
    router = CoreRouter("a", "b")
    given = [runs_sent(router.send(a_run(f"r{n}"))) for n in range(5)]
    targets = [worker for runs in given for worker in runs]
    assert sorted(targets) == ["a", "a", "b", "b"], "the fifth waits for a credit"
    first = given[0][targets[0]][0]
    commands = router.settle(first, targets[0])
    assert ends_sent(commands) == [Settled(RolloutId("r0"), 1, targets[0], FAILED)]
    assert [run.rollout_id for run in runs_sent(commands)[targets[0]]] == ["r4#5"]


def test_a_run_says_how_long_it_was_queued_including_lost_attempts() -> None:
    router = CoreRouter("a", credits=1)
    (first,) = runs_sent(router.on(ClientMessage(CLIENT, a_run("1"), 200.0)))[A]
    assert first.queued_s == 0.0
    assert runs_sent(router.on(ClientMessage(CLIENT, a_run("2"), 201.0))) == {}
    ended = Settled(first.rollout_id, first.attempt, A, FAILED)
    (second,) = runs_sent(router.on(WorkerMessage(A, ended, now_s=203.5)))[A]
    assert second.queued_s == 2.5
    assert runs_sent(router.on(WorkerDied(A))) == {}
    (again,) = runs_sent(router.on(WorkerMessage(B, Hello("b", 1), now_s=210.0)))[B]
    assert (again.attempt, again.queued_s) == (2, 9.0)


def test_a_late_worker_gets_less_until_it_has_caught_up() -> None:
    router = CoreRouter("a", "b", credits=4)
    router.on(WorkerMessage(A, stats("a", p99_s=2.0)))
    given = [worker for n in range(8) for worker in runs_sent(router.send(a_run(f"r{n}")))]
    assert (given.count(A), given.count(B)) == (2, 4)
    caught_up: list[RouterCommand] = []
    for _ in range(10):
        caught_up += router.on(WorkerMessage(A, stats("a")))
    assert len(runs_sent(caught_up)[A]) == 2, "what waited goes there without another nudge"


def test_the_router_numbers_runs_and_keeps_the_group_that_the_client_chose() -> None:
    router = CoreRouter("a")
    chosen = structs.replace(a_run("r"), group=12, serial=99)
    (run,) = runs_sent(router.send(chosen))[A]
    assert (run.rollout_id, run.serial, run.group) == ("r#1", 1, 12)


def test_a_run_sent_twice_is_answered_once() -> None:
    router = CoreRouter("a")
    (run,) = runs_sent(router.send(a_run("r")))[A]
    assert runs_sent(router.send(a_run("r"))) == {}
    assert router.core.num_dropped == 1
    assert len(ends_sent(router.settle(run, A))) == 1
    (again,) = runs_sent(router.send(a_run("r")))[A]
    assert again.rollout_id != run.rollout_id, (
        "the id may be used again, and is another rollout"
    )


def test_a_dead_workers_rollouts_move_without_blame() -> None:
    router = CoreRouter("a")
    router.send(a_run("r"))
    router.send(a_run("s"))
    lost = router.on(WorkerDied(A))
    assert sent(lost, WorkerLost) == [WorkerLost(A, 2, 0)]
    moved = runs_sent(router.on(WorkerMessage(B, Hello("b", 4))))[B]
    assert [(run.rollout_id, run.attempt) for run in moved] == [("r#1", 2), ("s#2", 2)]


def test_whoever_kills_its_worker_unseen_is_found_by_running_beside_ever_fewer_others() -> (
    None
):
    """Task "bad" ends its worker, and no board shows it. All others are scored."""
    names, router = [f"r{n}" for n in range(15)], CoreRouter("w0", credits=16)
    running: dict[RolloutId, Run] = {}
    ends: list[Settled] = []
    worker, num_deaths = WorkerName("w0"), 0

    def note(commands: list[RouterCommand]) -> None:
        running.update({run.rollout_id: run for run in runs_sent(commands).get(worker, [])})
        ends.extend(ends_sent(commands))

    for name in [*names, "bad"]:
        note(router.send(a_run(name)))
    while router.core.num_open:
        if any(key.startswith("bad#") for key in running):
            num_deaths += 1
            running.clear()
            note(router.on(WorkerDied(worker, "exited with 1")))
            worker = WorkerName(f"w{num_deaths}")
            note(router.on(WorkerMessage(worker, Hello(worker, 16))))
        else:
            _, run = running.popitem()
            ended = Settled(run.rollout_id, run.attempt, worker, Cancelled("well"))
            note(router.on(WorkerMessage(worker, ended)))
    wells = [end.rollout_id for end in ends if isinstance(end.outcome, Cancelled)]
    assert sorted(wells) == sorted(names)
    (outcome,) = [end.outcome for end in ends if end.rollout_id == "bad"]
    assert isinstance(outcome, Failed)
    assert "no other rollout was running when its worker died, 2 times" in outcome.error
    assert num_deaths <= 7


def test_a_rollout_that_loses_every_worker_fails_in_the_end() -> None:
    router = CoreRouter()
    router.send(a_run("r"))
    for n in range(MAX_ATTEMPTS):
        worker = WorkerName(f"w{n}")
        (run,) = runs_sent(router.on(WorkerMessage(worker, Hello(worker, 1))))[worker]
        assert run.attempt == n + 1
        lost = router.on(WorkerSilent(worker, 60.0, was_stopped=True))
    (end,) = ends_sent(lost)
    assert isinstance(end.outcome, Failed)
    assert end.outcome.boundary == "worker"
    assert router.core.num_open == 0


def test_the_rollout_to_blame_fails_after_two_crashes_and_the_others_move() -> None:
    router = CoreRouter("a", credits=3)
    serial = runs_sent(router.send(a_run("bad")))[A][0].serial
    router.send(a_run("good"))
    mark = RunningCode(serial, 0.0, "env.py:3 in rollout")
    assert ends_sent(router.on(WorkerDied(A, "exited with 9", mark=mark))) == []
    router.on(WorkerMessage(B, Hello("b", 3)))
    lost = router.on(WorkerDied(B, "exited with 9", mark=mark))
    (end,) = ends_sent(lost)
    assert (end.rollout_id, end.attempt) == ("bad", 2)
    assert isinstance(end.outcome, Failed)
    assert end.outcome.boundary == "worker"
    (note,) = [command for command in lost if isinstance(command, LogNote)]
    assert "bad#1" in note.text
    why = "exited with 9 while task '0' was running at env.py:3 in rollout"
    assert sent(lost, WorkerLost) == [WorkerLost(B, 1, 1, why)]


def test_a_cancel_reaches_waiting_running_and_moving_rollouts() -> None:
    router = CoreRouter("a", credits=1)
    (run,) = runs_sent(router.send(a_run("runs")))[A]
    router.send(a_run("waits"))
    assert [
        end.outcome for end in ends_sent(router.send(Cancel(RolloutId("waits"), "why")))
    ] == [Cancelled("why")]
    assert router.send(Cancel(RolloutId("runs"), "why")) == [
        SendToWorker(A, Cancel(run.rollout_id, "why"))
    ]
    assert [end.outcome for end in ends_sent(router.on(WorkerDied(A)))] == [Cancelled("why")]
    router.on(WorkerMessage(B, Hello("b", 1)))
    router.send(a_run("moves"))
    router.on(WorkerDied(B))
    assert [
        end.outcome for end in ends_sent(router.send(Cancel(RolloutId("moves"), "why")))
    ] == [Cancelled("why")]
    assert router.send(Cancel(RolloutId("unknown"), "why")) == []
    assert router.core.num_open == 0


def test_a_group_runs_in_one_worker_and_moves_together() -> None:
    router = CoreRouter("a", "b", credits=4, whole_groups=True)
    (where,) = runs_sent(router.send(a_group("r0", "r1", "r2")))
    (other,) = runs_sent(router.send(a_group("s0", "s1", "s2")))
    assert {where, other} == {A, B}
    assert runs_sent(router.send(a_group("t0", "t1"))) == {}, (
        "one free credit in each worker is not enough"
    )
    router.on(WorkerMessage(where, Settled(RolloutId("r1#2"), 1, where, FAILED)))
    router.on(WorkerDied(where))
    new = WorkerName("new")
    commands = router.on(WorkerMessage(new, Hello("new", 8, whole_groups=True)))
    groups = [[run.rollout_id for run in group.runs] for group in sent(commands, RunGroup)]
    assert groups == [["r0#1", "r2#3"], ["t0#7", "t1#8"]], "the lost ones first"
    assert {run.attempt for run in sent(commands, RunGroup)[0].runs} == {2}


def test_a_group_larger_than_any_worker_waits_for_an_empty_one() -> None:
    router = CoreRouter("a", credits=2, whole_groups=True)
    (run,) = runs_sent(router.send(a_group("small")))[A]
    assert runs_sent(router.send(a_group("r0", "r1", "r2"))) == {}
    assert len(runs_sent(router.settle(run, A))[A]) == 3


def test_a_waiting_group_loses_a_cancelled_member() -> None:
    router = CoreRouter(whole_groups=True)
    router.send(a_group("r0", "r1"))
    router.send(Cancel(RolloutId("r0"), "x"))
    commands = router.on(WorkerMessage(A, Hello("a", 2, whole_groups=True)))
    assert [[run.rollout_id for run in group.runs] for group in sent(commands, RunGroup)] == [
        ["r1#2"]
    ]


def test_a_frame_is_passed_on_and_its_bytes_return_to_the_worker() -> None:
    router = CoreRouter("a")
    (run,) = runs_sent(router.send(a_run("r")))[A]
    frame = object()
    (passed,) = router.settle(run, A, frame, 100)
    assert passed == SendToClient(CLIENT, Settled(RolloutId("r"), 1, A, FAILED), frame)
    again = router.settle(run, A, frame, 100)
    assert again == [SendToWorker(A, FrameTaken(A, 100))], (
        "no client waits for it: taken at once"
    )
    assert router.core.num_late == 1
    given_back = [router.send(FrameTaken(A, 60)) for _ in range(3)]
    assert given_back == [[SendToWorker(A, FrameTaken(A, size))] for size in (60, 40)] + [[]]


def test_frames_on_their_way_to_a_lost_client_are_given_back_to_the_worker() -> None:
    router = CoreRouter("a", client_lease_s=5.0)
    (run,) = runs_sent(router.send(a_run("r")))[A]
    router.settle(run, A, object(), 100)
    assert SendToWorker(A, FrameTaken(A, 100)) in router.wait(6.0, A)


WAYS = st.tuples(
    st.sampled_from([b"c", b"d"]), st.sampled_from([WorkerName("v"), WorkerName("w")])
)
ACTS = st.tuples(
    st.sampled_from(["sent", "taken", "lost", "forget"]), WAYS, st.integers(0, 50)
)


@given(st.lists(ACTS, max_size=40))
def test_every_byte_sent_is_given_back_at_most_once(acts: list[Any]) -> None:
    frames = FramesInTransit()
    on_their_way: Counter[Any] = Counter()
    for act, (client, worker), size in acts:
        match act:
            case "sent":
                frames.sent(client, worker, size)
                on_their_way[client, worker] += size
            case "taken":
                taken = frames.taken(client, worker, size)
                assert taken == min(size, on_their_way[client, worker])
                on_their_way[client, worker] -= taken
            case "lost":
                lost = {
                    way[1]: num
                    for way, num in on_their_way.items()
                    if way[0] == client and num
                }
                assert dict(frames.lost_with(client)) == lost
                on_their_way = Counter(
                    {way: n for way, n in on_their_way.items() if way[0] != client}
                )
            case "forget":
                frames.forget(worker)
                on_their_way = Counter(
                    {way: n for way, n in on_their_way.items() if way[1] != worker}
                )
