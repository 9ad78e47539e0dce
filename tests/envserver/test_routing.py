"""The router's decisions: every Run is answered once, whatever dies."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rollway.envserver.core.frames import FramesOnTheirWay
from rollway.envserver.core.routing import (
    MAX_ATTEMPTS,
    ClientGone,
    ClientSays,
    Routing,
    TellClient,
    TellWorker,
    WorkerDied,
    WorkerSays,
)
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.lag import LagStats, ProcessStats
from rollway.records.rollout import Cancelled, Failed, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import (
    Cancel,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Refused,
    Run,
    Stats,
    Tasks,
    Welcome,
)

TASK, SAMPLING = Task(id="0", prompt="?"), Sampling(8)
CLIENT = b"client"
FAILED = Failed("env", "x")


def a_run(id: str) -> Run:
    return Run(RolloutId(id), 1, TASK, SAMPLING, PolicyVersion(0))


def routing(*workers: str, credits: int = 2) -> Routing:
    core = Routing("env")
    core.on_event(ClientSays(CLIENT, Hello("c")))
    for worker in workers:
        core.on_event(WorkerSays(WorkerName(worker), Hello(worker, credits)))
    return core


def test_a_client_is_welcomed_or_refused_by_protocol() -> None:
    core = Routing("env")
    (told,) = core.on_event(ClientSays(CLIENT, Hello("c")))
    assert told == TellClient(CLIENT, Welcome("env", 0))
    (told,) = core.on_event(ClientSays(CLIENT, Hello("c", protocol=99)))
    assert isinstance(told, TellClient)
    assert isinstance(told.message, Refused)


def test_strangers_get_nothing() -> None:
    core = Routing("env")
    assert core.on_event(ClientSays(b"stranger", a_run("r"))) == []
    assert core.num_owed == 0
    assert core.num_dropped == 1


def test_runs_go_to_the_freest_worker_within_credits() -> None:
    core = routing("a", "b")
    told = [core.on_event(ClientSays(CLIENT, a_run(f"r{n}"))) for n in range(5)]
    targets = [command.worker for commands in told for command in commands]  # type: ignore[union-attr]
    assert sorted(targets) == ["a", "a", "b", "b"], "the fifth waits for a credit"
    settled = Settled(RolloutId("r0"), 1, targets[0], FAILED)
    commands = core.on_event(WorkerSays(targets[0], settled))
    assert commands[0] == TellClient(CLIENT, settled)
    assert isinstance(commands[1], TellWorker)
    assert commands[1].message.rollout_id == "r4"  # type: ignore[union-attr]


def test_a_dead_workers_rollouts_move_then_fail() -> None:
    core = routing("a")
    core.on_event(ClientSays(CLIENT, a_run("r")))
    core.on_event(WorkerDied(WorkerName("a")))
    assert core.num_owed == 1
    commands = core.on_event(WorkerSays(WorkerName("b"), Hello("b", 1)))
    runs = [
        one.message for one in commands if isinstance(one, TellWorker) and isinstance(one.message, Run)
    ]
    assert [run.attempt for run in runs] == [2]
    commands = core.on_event(WorkerDied(WorkerName("b")))
    ends = [one.message for one in commands if isinstance(one, TellClient)]
    assert isinstance(ends[0], Settled)
    assert isinstance(ends[0].outcome, Failed)
    assert ends[0].outcome.boundary == "worker"
    assert core.num_owed == 0


def test_a_cancel_outlives_the_worker_it_was_sent_to() -> None:
    core = routing("a", "b", credits=1)
    (told,) = core.on_event(ClientSays(CLIENT, a_run("r")))
    assert isinstance(told, TellWorker)
    core.on_event(ClientSays(CLIENT, Cancel(RolloutId("r"), "too old")))
    commands = core.on_event(WorkerDied(told.worker))
    ends = [one.message for one in commands if isinstance(one, TellClient)]
    assert isinstance(ends[0], Settled)
    assert ends[0].outcome == Cancelled("too old")
    assert core.num_owed == 0


def test_a_late_answer_of_a_lost_attempt_is_dropped() -> None:
    core = routing("a", "b", credits=1)
    core.on_event(ClientSays(CLIENT, a_run("r")))
    core.on_event(WorkerDied(WorkerName("a")))
    core.on_event(WorkerDied(WorkerName("b")))
    core.on_event(WorkerSays(WorkerName("c"), Hello("c", 1)))
    late = Settled(RolloutId("r"), 1, WorkerName("a"), FAILED)
    assert core.on_event(WorkerSays(WorkerName("a"), late)) == []
    assert core.num_dropped == 1


def test_a_frame_is_passed_on_and_its_bytes_return_to_the_worker() -> None:
    core = routing("a")
    worker = WorkerName("a")
    core.on_event(ClientSays(CLIENT, a_run("r")))
    settled = Settled(RolloutId("r"), 1, worker, FAILED)
    frame = object()
    told = core.on_event(WorkerSays(worker, settled, frame, 100))
    assert told == [TellClient(CLIENT, settled, frame)]
    assert told[0].frame is frame  # type: ignore[union-attr]
    again = core.on_event(WorkerSays(worker, settled, frame, 100))
    assert again == [TellWorker(worker, FrameTaken(worker, 100))], "nobody waits for it: taken at once"
    said = [core.on_event(ClientSays(CLIENT, FrameTaken(worker, 60))) for _ in range(3)]
    assert said == [[TellWorker(worker, FrameTaken(worker, size))] for size in (60, 40)] + [[]]


def test_frames_on_their_way_to_a_lost_client_bind_no_worker() -> None:
    core = routing("a")
    worker = WorkerName("a")
    core.on_event(ClientSays(CLIENT, a_run("r")))
    core.on_event(WorkerSays(worker, Settled(RolloutId("r"), 1, worker, FAILED), object(), 100))
    assert core.on_event(ClientGone(CLIENT)) == [TellWorker(worker, FrameTaken(worker, 100))]
    assert core.on_event(ClientGone(CLIENT)) == []


WAYS = st.tuples(st.sampled_from([b"c", b"d"]), st.sampled_from([WorkerName("v"), WorkerName("w")]))
ACTS = st.tuples(st.sampled_from(["sent", "taken", "lost", "forget"]), WAYS, st.integers(0, 50))


@given(st.lists(ACTS, max_size=40))
def test_every_byte_sent_is_given_back_at_most_once(acts: list[Any]) -> None:
    frames = FramesOnTheirWay()
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


def test_tasks_are_asked_of_one_worker_and_again_when_it_dies() -> None:
    core = routing("a", "b")
    wanted = NextTasks(0, 4)
    assert core.on_event(ClientSays(CLIENT, wanted)) == [TellWorker(WorkerName("a"), wanted)]
    commands = core.on_event(WorkerDied(WorkerName("a")))
    assert TellWorker(WorkerName("b"), wanted) in commands
    tasks = Tasks(0, (TASK,))
    assert core.on_event(WorkerSays(WorkerName("b"), tasks)) == [TellClient(CLIENT, tasks)]
    assert core.on_event(WorkerSays(WorkerName("b"), tasks)) == []


def test_a_new_worker_hears_the_current_policy() -> None:
    core = routing("a")
    assert len(core.on_event(ClientSays(CLIENT, NewPolicy(PolicyVersion(4))))) == 1
    commands = core.on_event(WorkerSays(WorkerName("b"), Hello("b", 1)))
    assert TellWorker(WorkerName("b"), NewPolicy(PolicyVersion(4))) in commands


class AnyOrder(RuleBasedStateMachine):
    """Runs, ends, cancels, deaths and births in any order."""

    runs = Bundle("runs")
    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.core = routing()
        self.asked: set[str] = set()
        self.answered: list[str] = []
        self.at: dict[str, dict[str, int]] = {}
        self.count = 0

    def do(self, event: Any) -> None:
        for command in self.core.on_event(event):
            match command:
                case TellWorker(worker=worker, message=Run(rollout_id=id, attempt=attempt)):
                    assert worker in self.at, "work for a dead worker"
                    assert attempt <= MAX_ATTEMPTS
                    self.at[worker][id] = attempt
                case TellWorker(worker=worker, message=Cancel(rollout_id=id)):
                    attempt = self.at[worker].pop(id)
                    ended = Settled(id, attempt, worker, Cancelled("x"))
                    self.do(WorkerSays(worker, ended))
                case TellClient(message=Settled(rollout_id=id)):
                    self.answered.append(id)

    @rule(target=runs)
    def dispatch(self) -> str:
        self.count += 1
        id = f"r{self.count}"
        self.asked.add(id)
        self.do(ClientSays(CLIENT, a_run(id)))
        return id

    @rule(target=workers, credits=st.integers(1, 3))
    def birth(self, credits: int) -> str:
        self.count += 1
        name = f"w{self.count}"
        self.at[name] = {}
        self.do(WorkerSays(WorkerName(name), Hello(name, credits)))
        return name

    @rule(worker=consumes(workers))
    def death(self, worker: str) -> None:
        del self.at[worker]
        self.do(WorkerDied(WorkerName(worker)))

    @rule(worker=workers)
    def finish_one(self, worker: str) -> None:
        if self.at[worker]:
            id, attempt = self.at[worker].popitem()
            settled = Settled(RolloutId(id), attempt, WorkerName(worker), FAILED)
            self.do(WorkerSays(WorkerName(worker), settled))
            self.do(WorkerSays(WorkerName(worker), settled))  # a duplicate changes nothing

    @rule(id=runs)
    def cancel(self, id: str) -> None:
        self.do(ClientSays(CLIENT, Cancel(RolloutId(id), "x")))

    @invariant()
    def each_answered_at_most_once_and_none_forgotten(self) -> None:
        assert len(self.answered) == len(set(self.answered))
        assert len(self.asked) == len(self.answered) + self.core.num_owed

    @invariant()
    def running_is_what_the_core_thinks(self) -> None:
        running = [id for ids in self.at.values() for id in ids]
        assert len(running) == len(set(running))

    def teardown(self) -> None:
        """With one healthy worker everything ends."""
        self.at["last"] = {}
        self.do(WorkerSays(WorkerName("last"), Hello("last", 1000)))
        for worker in list(self.at):
            while self.at[worker]:
                self.finish_one(worker)
        assert set(self.answered) == self.asked


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_client_that_went_away_hears_nothing_until_it_speaks_again() -> None:
    routing = Routing("env")
    routing.on_event(ClientSays(b"here", Hello("here")))
    routing.on_event(ClientSays(b"gone", Hello("gone")))
    stats = WorkerSays(WorkerName("w0"), Stats(ProcessStats("w0", LagStats(), 0)))
    routing.on_event(ClientGone(b"gone"))
    assert [one.client for one in routing.on_event(stats) if isinstance(one, TellClient)] == [b"here"]
    routing.on_event(ClientSays(b"gone", NextTasks(0, 1)))
    told = [one.client for one in routing.on_event(stats) if isinstance(one, TellClient)]
    assert told == [b"gone", b"here"]
