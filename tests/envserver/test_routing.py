"""The router's decisions: every Run is answered once, whatever dies, and clients are alone."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rollway.envserver.core.blame import MAX_ATTEMPTS
from rollway.envserver.core.dispatch import FramesInTransit
from rollway.envserver.core.events import (
    ClientSays,
    ClientUnreachable,
    EndServer,
    KillWorker,
    LogNote,
    RetireWorker,
    RouterCommand,
    RouterEvent,
    RouterTick,
    RunningCode,
    StartWorker,
    StopServer,
    TellClient,
    TellWorker,
    WorkerDied,
    WorkerSays,
    WorkerSilent,
)
from rollway.envserver.core.open_runs import serial_of
from rollway.envserver.core.routing import Bounds, Routing
from rollway.envserver.core.task_requests import MAX_OPEN
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.lag import LagStats, ProcessStats
from rollway.records.rollout import Cancelled, Failed, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import (
    Cancel,
    Drain,
    Drained,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Ping,
    Refused,
    RolloutProgress,
    Run,
    RunGroup,
    ServerStats,
    Tasks,
    Welcome,
    WorkerLost,
    WorkerProgress,
)

TASK, SAMPLING = Task(id="0", prompt="?"), Sampling(8)
CLIENT, OTHER = b"client", b"other"
A, B = WorkerName("a"), WorkerName("b")
FAILED = Failed("env", "x")


def a_run(id: str) -> Run:
    return Run(RolloutId(id), 1, TASK, SAMPLING, PolicyVersion(0))


def a_group(*ids: str) -> RunGroup:
    return RunGroup(tuple(a_run(id) for id in ids))


class Talk:
    """A core, and what it commands, sorted."""

    def __init__(
        self, *workers: str, credits: int = 2, whole_groups: bool = False, **bounds: Any
    ) -> None:
        self.core = Routing("env", Bounds(**bounds))
        self.now_s = 100.0
        self.on(RouterTick(self.now_s))
        self.on(ClientSays(CLIENT, Hello("c")))
        for worker in workers:
            self.on(WorkerSays(WorkerName(worker), Hello(worker, credits, whole_groups=whole_groups)))

    def on(self, event: RouterEvent) -> list[RouterCommand]:
        self.last = self.core.on_event(event)
        return self.last

    def say(self, message: Any, client: bytes = CLIENT) -> list[RouterCommand]:
        return self.on(ClientSays(client, message))

    def wait(
        self, seconds: float, *speak: WorkerName, pings: tuple[bytes, ...] = ()
    ) -> list[RouterCommand]:
        """Time passes while these workers and clients speak; every command of that time."""
        commands: list[RouterCommand] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.5)
            for worker in speak:
                commands += self.on(WorkerSays(worker, stats(worker)))
            for client in pings:
                commands += self.say(Ping(), client)
            commands += self.on(RouterTick(self.now_s))
        return commands

    def settle(self, run: Run, worker: WorkerName, *frame: Any) -> list[RouterCommand]:
        return self.on(WorkerSays(worker, Settled(run.rollout_id, run.attempt, worker, FAILED), *frame))


def stats(worker: str, p99_s: float = 0.0) -> ServerStats:
    return ServerStats(ProcessStats(worker, LagStats(p99=p99_s), 0))


def runs(commands: list[RouterCommand]) -> dict[WorkerName, list[Run]]:
    """Runs workers are told, groups too."""
    given: dict[WorkerName, list[Run]] = {}
    for one in commands:
        match one:
            case TellWorker(worker=worker, message=Run() as run):
                given.setdefault(worker, []).append(run)
            case TellWorker(worker=worker, message=RunGroup(runs=members)):
                given.setdefault(worker, []).extend(members)
    return given


def ends(commands: list[RouterCommand], client: bytes = CLIENT) -> list[Settled]:
    return [
        one.message for one in commands
        if isinstance(one, TellClient) and one.client == client and isinstance(one.message, Settled)
    ]  # fmt: skip


def told(commands: list[RouterCommand], kind: type[Any]) -> list[Any]:
    both = [one.message for one in commands if isinstance(one, TellClient | TellWorker)]
    return [message for message in both if isinstance(message, kind)]


# clients


def test_a_client_is_welcomed_once_a_worker_has_spoken() -> None:
    talk = Talk()
    assert talk.last == []
    welcomed = talk.on(WorkerSays(A, Hello("a", 2, whole_groups=True)))
    assert TellClient(CLIENT, Welcome("env", 1, whole_groups=True)) in welcomed
    assert talk.say(Hello("d"), OTHER) == [TellClient(OTHER, Welcome("env", 1, whole_groups=True))]
    assert told(talk.on(WorkerSays(B, Hello("b", 2, whole_groups=True))), Welcome) == [], "once each"


def test_another_protocol_is_refused() -> None:
    (refused,) = told(Talk().say(Hello("c", protocol=99), OTHER), Refused)
    assert "99" in refused.reason


@pytest.mark.parametrize("message", [a_run("r"), a_group("r"), NextTasks(0, 1), Ping()])
def test_strangers_get_nothing(message: Any) -> None:
    talk = Talk("a")
    assert talk.say(message, b"stranger") == []
    assert (talk.core.num_owed, talk.core.num_dropped) == (0, 1)


def test_two_clients_may_use_the_same_ids() -> None:
    talk = Talk("a", credits=8)
    talk.say(Hello("d"), OTHER)
    (mine,) = runs(talk.say(a_run("r")))[A]
    (theirs,) = runs(talk.say(a_run("r"), OTHER))[A]
    assert mine.rollout_id != theirs.rollout_id
    assert talk.say(Cancel(RolloutId("r"), "x"), OTHER) == [
        TellWorker(A, Cancel(theirs.rollout_id, "x"))
    ]
    assert [one.rollout_id for one in ends(talk.settle(theirs, A), OTHER)] == ["r"]
    commands = talk.settle(mine, A)
    assert [one.rollout_id for one in ends(commands)] == ["r"]
    assert ends(commands, OTHER) == []


def test_progress_reaches_its_own_client_only_and_news_all() -> None:
    talk = Talk("a", credits=8)
    talk.say(Hello("d"), OTHER)
    (mine,) = runs(talk.say(a_run("r")))[A]
    (theirs,) = runs(talk.say(a_run("s"), OTHER))[A]
    nobodys = RolloutProgress(RolloutId("x#9"), "env", 1.0, 0, 0)
    both = [RolloutProgress(one.rollout_id, "engine", 1.0, 2, 3) for one in (mine, theirs)]
    heard = talk.on(WorkerSays(A, WorkerProgress(A, (*both, nobodys))))
    assert {one.client: one.message.rollouts[0].rollout_id for one in heard} == {  # type: ignore[union-attr]
        CLIENT: "r",
        OTHER: "s",
    }
    assert [len(one.rollouts) for one in told(heard, WorkerProgress)] == [1, 1]
    assert len(told(talk.on(WorkerSays(A, stats("a"))), ServerStats)) == 2
    assert len(told(talk.on(WorkerDied(A)), WorkerLost)) == 2


def test_a_client_that_does_not_speak_is_told_no_news() -> None:
    talk = Talk("a")
    talk.wait(10.0, A)
    assert told(talk.on(WorkerSays(A, stats("a"))), ServerStats) == []
    talk.say(Ping())
    assert len(told(talk.on(WorkerSays(A, stats("a"))), ServerStats)) == 1


def test_a_client_may_not_have_everything_waiting() -> None:
    talk = Talk("a", credits=1, max_waiting=2)
    for id in ("runs", "waits1", "waits2"):
        assert ends(talk.say(a_run(id))) == []
    (failed,) = ends(talk.say(a_run("too many")))
    assert isinstance(failed.outcome, Failed)
    assert failed.outcome.boundary == "worker"
    assert "env.max_waiting" in failed.outcome.error
    talk.say(Hello("d"), OTHER)
    assert ends(talk.say(a_run("r"), OTHER), OTHER) == [], "another client has its own room"
    assert len(ends(talk.say(a_group("a", "b", "c")))) == 3


def test_a_silent_clients_rollouts_end_in_workers_and_queue() -> None:
    talk = Talk("a", credits=1, client_lease_s=10.0)
    (running,) = runs(talk.say(a_run("running")))[A]
    talk.say(a_run("waiting"))
    commands = talk.wait(12.0, A)
    assert [one.rollout_id for one in ends(commands)] == ["running", "waiting"]
    assert all(isinstance(one.outcome, Cancelled) for one in ends(commands))
    assert [one.rollout_id for one in told(commands, Cancel)] == [running.rollout_id]
    assert talk.core.num_owed == 0
    assert talk.settle(running, A) == [], "nobody is told, and its credit is free again"
    assert talk.core.num_late == 0
    assert runs(talk.say(a_run("again"))).keys() == {A}, "it was still there, and needs no new Hello"


def test_a_client_that_pings_stays() -> None:
    talk = Talk("a", client_lease_s=10.0)
    talk.say(a_run("r"))
    assert ends(talk.wait(60.0, A, pings=(CLIENT,))) == []


def test_answers_wait_for_a_client_that_lost_its_connection() -> None:
    talk = Talk("a", credits=4, client_lease_s=10.0)
    given = [runs(talk.say(a_run(id)))[A][0] for id in ("r", "s")]
    (answer,) = talk.settle(given[0], A)
    assert isinstance(answer, TellClient)
    assert talk.on(ClientUnreachable(answer)) == []
    assert told(talk.on(WorkerSays(A, stats("a"))), ServerStats) == []
    assert talk.say(Ping()) == [answer]
    assert talk.say(Ping()) == []
    (answer,) = talk.settle(given[1], A)
    assert isinstance(answer, TellClient)
    talk.on(ClientUnreachable(answer))
    talk.wait(12.0, A)
    assert talk.say(Ping()) == [], "nobody keeps it for ever"


# workers


def test_runs_go_to_the_freest_worker_within_credits() -> None:
    talk = Talk("a", "b")
    given = [runs(talk.say(a_run(f"r{n}"))) for n in range(5)]
    targets = [worker for one in given for worker in one]
    assert sorted(targets) == ["a", "a", "b", "b"], "the fifth waits for a credit"
    first = given[0][targets[0]][0]
    commands = talk.settle(first, targets[0])
    assert ends(commands) == [Settled(RolloutId("r0"), 1, targets[0], FAILED)]
    assert [one.rollout_id for one in runs(commands)[targets[0]]] == ["r4#5"]


def test_a_worker_is_told_how_long_a_run_was_kept_lost_attempts_included() -> None:
    talk = Talk("a", credits=1)
    (first,) = runs(talk.on(ClientSays(CLIENT, a_run("1"), 200.0)))[A]
    assert first.queued_s == 0.0
    assert runs(talk.on(ClientSays(CLIENT, a_run("2"), 201.0))) == {}
    ended = Settled(first.rollout_id, first.attempt, A, FAILED)
    (second,) = runs(talk.on(WorkerSays(A, ended, now_s=203.5)))[A]
    assert second.queued_s == 2.5
    assert runs(talk.on(WorkerDied(A))) == {}
    (again,) = runs(talk.on(WorkerSays(B, Hello("b", 1), now_s=210.0)))[B]
    assert (again.attempt, again.queued_s) == (2, 9.0)


def test_a_late_worker_gets_less_until_it_has_caught_up() -> None:
    talk = Talk("a", "b", credits=4)
    talk.on(WorkerSays(A, stats("a", p99_s=2.0)))
    given = [worker for n in range(8) for worker in runs(talk.say(a_run(f"r{n}")))]
    assert (given.count(A), given.count(B)) == (2, 4)
    caught_up: list[RouterCommand] = []
    for _ in range(10):
        caught_up += talk.on(WorkerSays(A, stats("a")))
    assert len(runs(caught_up)[A]) == 2, "what waited goes there without another nudge"


def test_a_run_sent_twice_is_answered_once() -> None:
    talk = Talk("a")
    (run,) = runs(talk.say(a_run("r")))[A]
    assert runs(talk.say(a_run("r"))) == {}
    assert talk.core.num_dropped == 1
    assert len(ends(talk.settle(run, A))) == 1
    (again,) = runs(talk.say(a_run("r")))[A]
    assert again.rollout_id != run.rollout_id, "the id may be used again, and is another rollout"


def test_a_dead_workers_rollouts_move_without_blame() -> None:
    talk = Talk("a")
    talk.say(a_run("r"))
    talk.say(a_run("s"))
    lost = talk.on(WorkerDied(A))
    assert told(lost, WorkerLost) == [WorkerLost(A, 2, 0)]
    moved = runs(talk.on(WorkerSays(B, Hello("b", 2))))[B]
    assert [(run.rollout_id, run.attempt) for run in moved] == [("r#1", 2), ("s#2", 2)]


def test_a_rollout_that_loses_every_worker_fails_in_the_end() -> None:
    talk = Talk()
    talk.say(a_run("r"))
    for n in range(MAX_ATTEMPTS):
        worker = WorkerName(f"w{n}")
        (run,) = runs(talk.on(WorkerSays(worker, Hello(worker, 1))))[worker]
        assert run.attempt == n + 1
        lost = talk.on(WorkerDied(worker))
    (end,) = ends(lost)
    assert isinstance(end.outcome, Failed)
    assert end.outcome.boundary == "worker"
    assert talk.core.num_owed == 0


def test_the_culprit_of_a_crash_fails_the_second_time_and_the_others_move() -> None:
    talk = Talk("a", credits=3)
    serial = serial_of(runs(talk.say(a_run("bad")))[A][0].rollout_id)
    talk.say(a_run("good"))
    mark = RunningCode(serial, 0.0, "env.py:3 in rollout")
    assert ends(talk.on(WorkerDied(A, "exited with 9", mark=mark))) == []
    talk.on(WorkerSays(B, Hello("b", 3)))
    lost = talk.on(WorkerDied(B, "exited with 9", mark=mark))
    (end,) = ends(lost)
    assert (end.rollout_id, end.attempt) == ("bad", 2)
    assert isinstance(end.outcome, Failed)
    assert end.outcome.boundary == "worker"
    (note,) = [one for one in lost if isinstance(one, LogNote)]
    assert "bad#1" in note.text
    assert told(lost, WorkerLost) == [WorkerLost(B, 1, 1)]


def test_a_silent_worker_is_killed_and_what_held_it_fails_alone() -> None:
    talk = Talk("a", "b", credits=2, lease_s=4.0)
    given = [run for id in "rstu" for run in runs(talk.say(a_run(id))).get(A, [])]
    commands = talk.wait(5.0, B, pings=(CLIENT,))
    (kill,) = [one for one in commands if isinstance(one, KillWorker)]
    assert kill.worker == A
    assert kill.silent_s > 4.0
    assert runs(talk.say(a_run("late"))) == {}, "a worker that is to be killed gets nothing"
    mark = RunningCode(serial_of(given[0].rollout_id), 4.5, "env.py:3 in rollout")
    lost = talk.on(WorkerSilent(A, kill.silent_s, mark=mark))
    (end,) = ends(lost)
    assert isinstance(end.outcome, Failed)
    assert end.outcome.boundary == "env"
    assert "env.py:3" in end.outcome.error
    assert told(lost, WorkerLost) == [WorkerLost(A, 1, 1)]
    assert talk.on(WorkerDied(A)) == [], "buried once"
    assert talk.settle(given[1], A) == [], "what it still says comes too late"
    assert talk.core.num_late == 1


def test_workers_that_speak_keep_their_lease() -> None:
    talk = Talk("a", lease_s=4.0)
    assert not [one for one in talk.wait(60.0, A) if isinstance(one, KillWorker)]


def test_a_cancel_reaches_waiting_running_and_moving_rollouts() -> None:
    talk = Talk("a", credits=1)
    (run,) = runs(talk.say(a_run("runs")))[A]
    talk.say(a_run("waits"))
    assert [one.outcome for one in ends(talk.say(Cancel(RolloutId("waits"), "why")))] == [
        Cancelled("why")
    ]
    assert talk.say(Cancel(RolloutId("runs"), "why")) == [TellWorker(A, Cancel(run.rollout_id, "why"))]
    assert [one.outcome for one in ends(talk.on(WorkerDied(A)))] == [Cancelled("why")]
    talk.on(WorkerSays(B, Hello("b", 1)))
    talk.say(a_run("moves"))
    talk.on(WorkerDied(B))
    assert [one.outcome for one in ends(talk.say(Cancel(RolloutId("moves"), "why")))] == [
        Cancelled("why")
    ]
    assert talk.say(Cancel(RolloutId("nobody"), "why")) == []
    assert talk.core.num_owed == 0


# groups


def test_a_group_runs_in_one_place_and_moves_together() -> None:
    talk = Talk("a", "b", credits=4, whole_groups=True)
    (where,) = runs(talk.say(a_group("r0", "r1", "r2")))
    (other,) = runs(talk.say(a_group("s0", "s1", "s2")))
    assert {where, other} == {A, B}
    assert runs(talk.say(a_group("t0", "t1"))) == {}, "one free credit in each place is not two"
    (settled, *_) = [RolloutId("r1#2")]
    talk.on(WorkerSays(where, Settled(settled, 1, where, FAILED)))
    talk.on(WorkerDied(where))
    new = WorkerName("new")
    commands = talk.on(WorkerSays(new, Hello("new", 8, whole_groups=True)))
    groups = [[run.rollout_id for run in one.runs] for one in told(commands, RunGroup)]
    assert groups == [["r0#1", "r2#3"], ["t0#7", "t1#8"]], "the lost ones first"
    assert {run.attempt for run in told(commands, RunGroup)[0].runs} == {2}


def test_a_group_larger_than_any_worker_waits_for_an_empty_one() -> None:
    talk = Talk("a", credits=2, whole_groups=True)
    (run,) = runs(talk.say(a_group("small")))[A]
    assert runs(talk.say(a_group("r0", "r1", "r2"))) == {}
    assert len(runs(talk.settle(run, A))[A]) == 3


def test_a_waiting_group_loses_a_cancelled_member() -> None:
    talk = Talk(whole_groups=True)
    talk.say(a_group("r0", "r1"))
    talk.say(Cancel(RolloutId("r0"), "x"))
    commands = talk.on(WorkerSays(A, Hello("a", 2, whole_groups=True)))
    assert [[run.rollout_id for run in one.runs] for one in told(commands, RunGroup)] == [["r1#2"]]


# frames


def test_a_frame_is_passed_on_and_its_bytes_return_to_the_worker() -> None:
    talk = Talk("a")
    (run,) = runs(talk.say(a_run("r")))[A]
    frame = object()
    (passed,) = talk.settle(run, A, frame, 100)
    assert passed == TellClient(CLIENT, Settled(RolloutId("r"), 1, A, FAILED), frame)
    again = talk.settle(run, A, frame, 100)
    assert again == [TellWorker(A, FrameTaken(A, 100))], "nobody waits for it: taken at once"
    assert talk.core.num_late == 1
    said = [talk.say(FrameTaken(A, 60)) for _ in range(3)]
    assert said == [[TellWorker(A, FrameTaken(A, size))] for size in (60, 40)] + [[]]


def test_frames_on_their_way_to_a_lost_client_bind_no_worker() -> None:
    talk = Talk("a", client_lease_s=5.0)
    (run,) = runs(talk.say(a_run("r")))[A]
    talk.settle(run, A, object(), 100)
    assert TellWorker(A, FrameTaken(A, 100)) in talk.wait(6.0, A)


WAYS = st.tuples(st.sampled_from([b"c", b"d"]), st.sampled_from([WorkerName("v"), WorkerName("w")]))
ACTS = st.tuples(st.sampled_from(["sent", "taken", "lost", "forget"]), WAYS, st.integers(0, 50))


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
                lost = {way[1]: num for way, num in on_their_way.items() if way[0] == client and num}
                assert dict(frames.lost_with(client)) == lost
                on_their_way = Counter({way: n for way, n in on_their_way.items() if way[0] != client})
            case "forget":
                frames.forget(worker)
                on_their_way = Counter({way: n for way, n in on_their_way.items() if way[1] != worker})


# tasks and policy


def test_tasks_are_asked_of_one_worker_and_again_when_it_dies() -> None:
    talk = Talk("a", "b")
    wanted = NextTasks(0, 4)
    assert talk.say(wanted) == [TellWorker(A, wanted)]
    assert TellWorker(B, wanted) in talk.on(WorkerDied(A))
    tasks = Tasks(0, (TASK,))
    assert talk.on(WorkerSays(A, tasks)) == [], "a dead worker's answer counts no more"
    assert talk.on(WorkerSays(B, tasks)) == [TellClient(CLIENT, tasks)]
    assert talk.on(WorkerSays(B, tasks)) == []


def test_splits_and_clients_get_their_own_tasks() -> None:
    talk = Talk("a")
    talk.say(Hello("d"), OTHER)
    talk.say(NextTasks(0, 4))
    talk.say(NextTasks(0, 4, split="eval"))
    talk.say(NextTasks(0, 2), OTHER)
    few, many = Tasks(0, (TASK,)), Tasks(0, (TASK, TASK))
    held_out = Tasks(0, (TASK,), split="eval")
    assert talk.on(WorkerSays(A, held_out)) == [TellClient(CLIENT, held_out)]
    assert talk.on(WorkerSays(A, many)) == [TellClient(CLIENT, many)], "answers come in order"
    assert talk.on(WorkerSays(A, few)) == [TellClient(OTHER, few)]


def test_a_client_may_not_have_all_questions_open() -> None:
    talk = Talk("a")
    talk.say(Hello("d"), OTHER)
    for start in range(MAX_OPEN):
        assert told(talk.say(NextTasks(start, 1)), NextTasks)
    assert told(talk.say(NextTasks(0, 1)), NextTasks), "one that is open already may be asked again"
    (refused,) = told(talk.say(NextTasks(MAX_OPEN, 1, split="eval")), Tasks)
    assert (refused.start, refused.split) == (MAX_OPEN, "eval")
    assert "the most a client may have" in refused.error
    assert told(talk.say(NextTasks(0, 1), OTHER), NextTasks), "another client has its own"
    talk.on(WorkerSays(A, Tasks(0, (TASK,))))
    assert told(talk.say(NextTasks(MAX_OPEN, 1)), NextTasks)


def test_a_new_worker_hears_the_current_policy() -> None:
    talk = Talk("a")
    assert len(talk.say(NewPolicy(PolicyVersion(4)))) == 1
    commands = talk.on(WorkerSays(B, Hello("b", 1)))
    assert TellWorker(B, NewPolicy(PolicyVersion(4))) in commands


# the pool's size, and the end


def test_workers_are_started_under_load_and_drained_when_idle() -> None:
    talk = Talk("a", credits=1, max_workers=3, idle_s=5.0)
    given = [runs(talk.say(a_run(id))) for id in ("r", "s", "t")]
    commands = talk.wait(4.0, A, pings=(CLIENT,))
    assert commands.count(StartWorker()) == 2
    assert StartWorker() not in talk.wait(10.0, A, pings=(CLIENT,)), "they are on their way"
    (moved,) = runs(talk.on(WorkerSays(B, Hello("b", 1))))[B]
    (third,) = runs(talk.on(WorkerSays(WorkerName("c"), Hello("c", 1))))[WorkerName("c")]
    for run, worker in ((given[0][A][0], A), (moved, B), (third, WorkerName("c"))):
        talk.settle(run, worker)
    commands = talk.wait(6.0, A, B, WorkerName("c"), pings=(CLIENT,))
    retired = [one.worker for one in commands if isinstance(one, RetireWorker)]
    assert retired == ["c", "b"]
    assert [
        one.worker for one in commands if isinstance(one, TellWorker) and one.message == Drain()
    ] == (retired)
    assert told(talk.on(WorkerDied(B)), WorkerLost) == [], "it ended as it was told to"
    assert runs(talk.say(a_run("u"))).keys() == {A}


def test_a_drained_worker_says_so_behind_its_last_answer() -> None:
    talk = Talk("a", credits=1)
    (run,) = runs(talk.say(a_run("r")))[A]
    talk.on(StopServer())
    assert len(ends(talk.settle(run, A))) == 1
    assert talk.core.num_workers == 1
    assert told(talk.on(WorkerSays(A, Drained())), WorkerLost) == []
    assert talk.core.num_workers == 0


def test_stopping_ends_what_waits_and_lets_the_rest_finish() -> None:
    talk = Talk("a", credits=1)
    (run,) = runs(talk.say(a_run("runs")))[A]
    talk.say(a_run("waits"))
    commands = talk.on(StopServer())
    assert [one.rollout_id for one in ends(commands)] == ["waits"]
    assert TellWorker(A, Drain()) in commands
    (refused,) = ends(talk.say(a_run("too late")))
    assert isinstance(refused.outcome, Cancelled)
    assert len(ends(talk.settle(run, A))) == 1
    assert told(talk.on(WorkerSays(B, Hello("b", 1))), Drain) == [Drain()]


def test_the_end_answers_whatever_is_owed() -> None:
    talk = Talk("a", "b", credits=1)
    talk.say(a_run("r"))
    talk.say(a_run("s"))
    talk.on(StopServer())
    (lost,) = ends(talk.on(WorkerDied(A)))
    (left,) = ends(talk.on(EndServer()))
    assert {lost.rollout_id, left.rollout_id} == {"r", "s"}
    assert isinstance(lost.outcome, Cancelled)
    assert talk.core.num_owed == 0


class AnyOrder(RuleBasedStateMachine):
    """Runs, groups, ends, cancels, deaths, births, silences and clients in any order."""

    jobs = Bundle("jobs")
    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.core = Routing(
            "env", Bounds(lease_s=5.0, client_lease_s=20.0, max_waiting=12, max_workers=4)
        )
        self.asked: Counter[tuple[bytes, str]] = Counter()
        self.answered: Counter[tuple[bytes, str]] = Counter()
        self.at: dict[str, dict[str, int]] = {}
        self.count = 0
        self.now_s = 0.0
        self.tick(0.1, b"both")
        for client in (CLIENT, OTHER):
            self.do(ClientSays(client, Hello("c")))

    def do(self, event: Any) -> None:
        for command in self.core.on_event(event):
            match command:
                case TellWorker(worker=worker, message=Run() | RunGroup() as message):
                    assert worker in self.at, "work for a dead worker"
                    given = message.runs if isinstance(message, RunGroup) else (message,)
                    for run in given:
                        assert run.attempt <= MAX_ATTEMPTS
                        assert run.rollout_id not in self.at[worker]
                        self.at[worker][run.rollout_id] = run.attempt
                case TellWorker(worker=worker, message=Cancel(rollout_id=key)):
                    attempt = self.at[worker].pop(key)
                    self.do(WorkerSays(worker, Settled(key, attempt, worker, Cancelled("x"))))
                case TellClient(client=client, message=Settled(rollout_id=id)):
                    self.answered[client, id] += 1
                case KillWorker(worker=worker, silent_s=silent_s):
                    running = sorted(self.at.pop(worker))
                    mark = RunningCode(serial_of(RolloutId(running[0])), silent_s) if running else None
                    self.do(WorkerSilent(worker, silent_s, mark=mark))

    @rule(target=jobs, client=st.sampled_from([CLIENT, OTHER]), size=st.integers(1, 3))
    def dispatch(self, client: bytes, size: int) -> tuple[bytes, str]:
        self.count += 1
        ids = [f"r{self.count // 2}.{member}" for member in range(size)]  # clients share some of them
        new = [id for id in ids if self.asked[client, id] == self.answered[client, id]]
        for id in new:
            self.asked[client, id] += 1
        self.do(ClientSays(client, a_group(*ids) if size > 1 else a_run(ids[0])))
        return client, ids[0]

    @rule(target=workers, credits=st.integers(1, 3))
    def birth(self, credits: int) -> str:
        self.count += 1
        name = f"w{self.count}"
        self.at[name] = {}
        self.do(WorkerSays(WorkerName(name), Hello(name, credits)))
        return name

    @rule(worker=consumes(workers), blames=st.booleans(), by_sigkill=st.booleans())
    def death(self, worker: str, blames: bool, by_sigkill: bool) -> None:
        running = sorted(self.at.pop(worker, {}))
        mark = RunningCode(serial_of(RolloutId(running[0])), 0.1) if blames and running else None
        self.do(WorkerDied(WorkerName(worker), by_sigkill=by_sigkill, mark=mark))

    @rule(worker=workers)
    def finish_one(self, worker: str) -> None:
        if self.at.get(worker):
            key, attempt = self.at[worker].popitem()
            settled = Settled(RolloutId(key), attempt, WorkerName(worker), FAILED)
            self.do(WorkerSays(WorkerName(worker), settled))
            self.do(WorkerSays(WorkerName(worker), settled))  # a duplicate changes nothing

    @rule(job=jobs)
    def cancel(self, job: tuple[bytes, str]) -> None:
        self.do(ClientSays(job[0], Cancel(RolloutId(job[1]), "x")))

    @rule(seconds=st.sampled_from([0.2, 0.9]), speaks=st.sampled_from([CLIENT, OTHER, b"both"]))
    def tick(self, seconds: float, speaks: bytes) -> None:
        for _ in range(8):
            self.now_s += seconds
            for client in (CLIENT, OTHER):
                if speaks in (client, b"both"):
                    self.do(ClientSays(client, Ping()))
            self.do(RouterTick(self.now_s))

    @rule(
        worker=workers, p99_s=st.sampled_from([0.0, 0.0, 1.0]), rss=st.sampled_from([1 << 28, 1 << 32])
    )
    def speak(self, worker: str, p99_s: float, rss: int) -> None:
        if worker in self.at:
            said = ServerStats(ProcessStats(worker, LagStats(p99=p99_s), rss))
            self.do(WorkerSays(WorkerName(worker), said))

    @invariant()
    def nothing_waits_while_there_is_room(self) -> None:
        size = self.core._dispatch.waiting.next_size()
        assert not size or self.core._pool.freest(size) is None

    @invariant()
    def each_is_answered_once_and_none_forgotten(self) -> None:
        assert not self.answered - self.asked, "answered twice"
        assert (self.asked - self.answered).total() == self.core.num_owed

    @invariant()
    def a_rollout_runs_in_one_place(self) -> None:
        running = [key for keys in self.at.values() for key in keys]
        assert len(running) == len(set(running))

    def teardown(self) -> None:
        """With one healthy worker everything ends."""
        self.at["last"] = {}
        self.do(WorkerSays(WorkerName("last"), Hello("last", 1000)))
        for worker in list(self.at):
            while self.at.get(worker):
                self.finish_one(worker)
        assert self.answered == self.asked
        assert self.core.num_owed == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
