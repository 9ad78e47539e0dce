"""The router's decisions: silent workers, the size of the pool, the end, and events in any order."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.doubles.router_core import (
    CLIENT,
    FAILED,
    OTHER,
    A,
    B,
    CoreRouter,
    a_group,
    a_run,
    ends_sent,
    runs_sent,
    sent,
)

from rollway.config.sections import ServerConfig
from rollway.config.specs import ServerLimits
from rollway.envserver.core.blame import MAX_ATTEMPTS
from rollway.envserver.core.events import (
    ClientMessage,
    EndServer,
    KillWorker,
    RetireWorker,
    RouterStats,
    RouterTick,
    RunningCode,
    SendToClient,
    SendToWorker,
    StartWorker,
    StopServer,
    WorkerDied,
    WorkerMessage,
    WorkerSilent,
)
from rollway.envserver.core.routing import Routing
from rollway.inference.engines.engine import Policies
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.lag import LagStats, ProcessStats
from rollway.records.rollout import Cancelled, Failed, Settled
from rollway.wire.messages import (
    Cancel,
    Drain,
    Drained,
    Hello,
    NewPolicy,
    Ping,
    ReplaceMe,
    Run,
    RunGroup,
    ServerStats,
    WorkerLost,
)

SHORT_LEASE = ServerConfig(workers=1, lease_s=4.0)
UP_TO_THREE = ServerConfig(workers=3, min_workers=1)


def test_a_silent_worker_is_killed_and_only_the_rollout_that_held_it_fails() -> None:
    router = CoreRouter("a", "b", credits=2, server=SHORT_LEASE)
    given = [run for id in "rstu" for run in runs_sent(router.send(a_run(id))).get(A, [])]
    commands = router.wait(5.0, B, pings=(CLIENT,))
    (kill,) = [command for command in commands if isinstance(command, KillWorker)]
    assert kill.worker == A
    assert kill.silent_s > 4.0
    assert runs_sent(router.send(a_run("late"))) == {}, (
        "a worker that is being killed gets nothing"
    )
    mark = RunningCode(given[0].serial, 4.5, "env.py:3 in rollout")
    lost = router.on(WorkerSilent(A, kill.silent_s, mark=mark))
    (end,) = ends_sent(lost)
    assert isinstance(end.outcome, Failed)
    assert end.outcome.boundary == "env"
    assert end.outcome.where == "env.py:3 in rollout"
    (news,) = sent(lost, WorkerLost)
    assert (news.worker, news.num_moved, news.num_failed) == (A, 1, 1)
    assert news.why.endswith("held its event loop at env.py:3 in rollout")
    assert router.on(WorkerDied(A)) == [], "a worker is lost once"
    assert router.settle(given[1], A) == [], "what it still sends comes too late"
    assert router.core.num_late == 1


def test_workers_that_send_statistics_keep_their_lease() -> None:
    router = CoreRouter("a", server=SHORT_LEASE)
    assert not [
        command for command in router.wait(60.0, A) if isinstance(command, KillWorker)
    ]


def test_a_worker_with_code_that_refuses_to_end_finishes_what_it_has() -> None:
    router = CoreRouter("a", credits=2)
    (given,) = runs_sent(router.send(a_run("r")))[A]
    commands = router.on(WorkerMessage(A, ReplaceMe("code of r refuses to end")))
    assert SendToWorker(A, Drain()) in commands
    assert runs_sent(router.send(a_run("late"))) == {}, "it gets nothing more"
    assert [end.outcome for end in ends_sent(router.settle(given, A))] == [FAILED]
    router.on(WorkerMessage(A, Drained()))
    assert "late" in str(router.on(WorkerMessage(B, Hello("b", 2)))), (
        "its successor takes over"
    )
    assert router.on(WorkerMessage(A, ReplaceMe("again"))) == [], "it is gone"


def test_a_rollout_whose_end_is_never_reported_ends_all_the_same() -> None:
    server = ServerConfig(
        workers=1, rollout_deadline_s=10.0, scoring_deadline_s=5.0, tool_deadline_s=5.0
    )
    router = CoreRouter("a", credits=2, server=server)
    (lost,) = runs_sent(router.send(a_run("lost")))[A]
    assert not ends_sent(router.wait(130.0, A, pings=(CLIENT,)))
    (healthy,) = runs_sent(router.send(a_run("healthy")))[A]
    commands = router.wait(20.0, A, pings=(CLIENT,))
    (end,) = ends_sent(commands)
    assert end.rollout_id == "lost"
    assert isinstance(end.outcome, Failed)
    assert end.outcome.text == "worker: a did not report its end within 140 s"
    assert SendToWorker(A, Drain()) in commands
    assert not [
        c for c in router.wait(90.0, A, pings=(CLIENT,)) if isinstance(c, KillWorker)
    ], "a healthy rollout is finished"
    assert len(ends_sent(router.settle(healthy, A))) == 1
    (kill,) = [c for c in router.wait(90.0, A, pings=(CLIENT,)) if isinstance(c, KillWorker)]
    assert kill.worker == A, "it does not end"
    assert router.settle(lost, A) == [], "the end comes too late"


def test_a_new_worker_gets_the_current_policy_version() -> None:
    router = CoreRouter("a")
    assert len(router.send(NewPolicy(PolicyVersion(4)))) == 1
    commands = router.on(WorkerMessage(B, Hello("b", 1)))
    assert SendToWorker(B, NewPolicy(PolicyVersion(4), client=1)) in commands


def test_a_client_sets_the_version_of_its_own_rollouts_only() -> None:
    router = CoreRouter("a", credits=8)
    other = b"other"
    router.on(ClientMessage(other, Hello("other")))
    (mine,) = runs_sent(router.send(a_run("r")))[A]
    (theirs,) = runs_sent(router.send(a_run("r"), other))[A]
    assert mine.client != theirs.client
    (told,) = router.send(NewPolicy(PolicyVersion(999), client=mine.client), other)
    assert told == SendToWorker(A, NewPolicy(PolicyVersion(999), client=theirs.client))
    policies = Policies()
    policies.of(theirs.client).version = 999
    assert policies.of(mine.client).version == 0


def test_the_routers_own_statistics_are_news_for_clients() -> None:
    router = CoreRouter("a")
    router.send(Hello("d"), OTHER)
    news = ServerStats(ProcessStats("env.router", LagStats(), 0))
    assert router.on(RouterStats(news.stats)) == [
        SendToClient(CLIENT, news), SendToClient(OTHER, news)
    ]  # fmt: skip


def test_workers_are_started_under_load_and_drained_when_idle() -> None:
    router = CoreRouter("a", credits=1, server=UP_TO_THREE, idle_s=5.0)
    given = [runs_sent(router.send(a_run(id))) for id in ("r", "s", "t")]
    commands = router.wait(4.0, A, pings=(CLIENT,))
    assert commands.count(StartWorker()) == 2
    assert StartWorker() not in router.wait(10.0, A, pings=(CLIENT,)), "they are starting"
    (moved,) = runs_sent(router.on(WorkerMessage(B, Hello("b", 1))))[B]
    (third,) = runs_sent(router.on(WorkerMessage(WorkerName("c"), Hello("c", 1))))[
        WorkerName("c")
    ]
    for run, worker in ((given[0][A][0], A), (moved, B), (third, WorkerName("c"))):
        router.settle(run, worker)
    commands = router.wait(6.0, A, B, WorkerName("c"), pings=(CLIENT,))
    retired = [command.worker for command in commands if isinstance(command, RetireWorker)]
    assert retired == ["c", "b"]
    assert [
        command.worker
        for command in commands
        if isinstance(command, SendToWorker) and command.message == Drain()
    ] == (retired)
    assert sent(router.on(WorkerDied(B)), WorkerLost) == [], "it ended as it was told to"
    assert runs_sent(router.send(a_run("u"))).keys() == {A}


def test_a_worker_is_up_until_it_says_that_it_is_drained() -> None:
    router = CoreRouter("a", credits=1)
    (run,) = runs_sent(router.send(a_run("r")))[A]
    router.on(StopServer())
    assert len(ends_sent(router.settle(run, A))) == 1
    assert router.core.num_workers == 1
    assert sent(router.on(WorkerMessage(A, Drained())), WorkerLost) == []
    assert router.core.num_workers == 0


def test_stopping_cancels_waiting_rollouts_and_lets_running_ones_finish() -> None:
    router = CoreRouter("a", credits=1)
    (run,) = runs_sent(router.send(a_run("runs")))[A]
    router.send(a_run("waits"))
    commands = router.on(StopServer())
    assert [end.rollout_id for end in ends_sent(commands)] == ["waits"]
    assert SendToWorker(A, Drain()) in commands
    (refused,) = ends_sent(router.send(a_run("too late")))
    assert isinstance(refused.outcome, Cancelled)
    assert len(ends_sent(router.settle(run, A))) == 1
    assert sent(router.on(WorkerMessage(B, Hello("b", 1))), Drain) == [Drain()]


def test_the_end_answers_every_open_rollout() -> None:
    router = CoreRouter("a", "b", credits=1)
    router.send(a_run("r"))
    router.send(a_run("s"))
    router.on(StopServer())
    (lost,) = ends_sent(router.on(WorkerDied(A)))
    (left,) = ends_sent(router.on(EndServer()))
    assert {lost.rollout_id, left.rollout_id} == {"r", "s"}
    assert isinstance(lost.outcome, Cancelled)
    assert router.core.num_open == 0


class AnyOrder(RuleBasedStateMachine):
    """Runs, groups, ends, cancels, starts and deaths of workers, silences and clients, in any order."""

    sent_runs = Bundle("sent_runs")
    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        server = ServerConfig(workers=4, min_workers=1, lease_s=5.0)
        self.core = Routing("env", server, ServerLimits(client_lease_s=20.0, max_waiting=12))
        self.sent: Counter[tuple[bytes, str]] = Counter()
        self.answered: Counter[tuple[bytes, str]] = Counter()
        self.running: dict[str, dict[str, Run]] = {}
        """By worker and key."""
        self.keys_by_serial: dict[int, str] = {}
        self.count = 0
        self.now_s = 0.0
        self.tick(0.1, b"both")
        for client in (CLIENT, OTHER):
            self.do(ClientMessage(client, Hello("c")))

    def do(self, event: Any) -> None:
        for command in self.core.on_event(event):
            match command:
                case SendToWorker(worker=worker, message=Run() as run):
                    self.start(worker, run)
                case SendToWorker(worker=worker, message=RunGroup() as group):
                    for run in group.runs:
                        self.start(worker, run)
                case SendToWorker(worker=worker, message=Cancel(rollout_id=key)):
                    run = self.running[worker].pop(key)
                    settled = Settled(key, run.attempt, worker, Cancelled("x"))
                    self.do(WorkerMessage(worker, settled))
                case SendToClient(client=client, message=Settled(rollout_id=rollout_id)):
                    self.answered[client, rollout_id] += 1
                case KillWorker(worker=worker, silent_s=silent_s):
                    mark = self.running_code(self.running.pop(worker), silent_s)
                    self.do(WorkerSilent(worker, silent_s, mark=mark))

    def start(self, worker: str, run: Run) -> None:
        assert worker in self.running, "work for a dead worker"
        assert run.attempt <= MAX_ATTEMPTS
        assert run.rollout_id not in self.running[worker]
        assert self.keys_by_serial.setdefault(run.serial, run.rollout_id) == run.rollout_id
        self.running[worker][run.rollout_id] = run

    def running_code(self, runs: dict[str, Run], held_s: float) -> RunningCode | None:
        """Blame one of these runs, always the same."""
        return RunningCode(runs[min(runs)].serial, held_s) if runs else None

    @rule(target=sent_runs, client=st.sampled_from([CLIENT, OTHER]), size=st.integers(1, 3))
    def send(self, client: bytes, size: int) -> tuple[bytes, str]:
        self.count += 1
        ids = [
            f"r{self.count // 2}.{member}" for member in range(size)
        ]  # clients share some of them
        for rollout_id in ids:
            if self.sent[client, rollout_id] == self.answered[client, rollout_id]:
                self.sent[client, rollout_id] += 1
        self.do(ClientMessage(client, a_group(*ids) if size > 1 else a_run(ids[0])))
        return client, ids[0]

    @rule(target=workers, credits=st.integers(1, 3))
    def start_worker(self, credits: int) -> str:
        self.count += 1
        name = f"w{self.count}"
        self.running[name] = {}
        self.do(WorkerMessage(WorkerName(name), Hello(name, credits)))
        return name

    @rule(worker=consumes(workers), blames=st.booleans(), by_sigkill=st.booleans())
    def kill_worker(self, worker: str, blames: bool, by_sigkill: bool) -> None:
        runs = self.running.pop(worker, {})
        mark = self.running_code(runs, 0.1) if blames else None
        self.do(WorkerDied(WorkerName(worker), by_sigkill=by_sigkill, mark=mark))

    @rule(worker=workers)
    def finish_a_rollout(self, worker: str) -> None:
        if self.running.get(worker):
            key, run = self.running[worker].popitem()
            settled = Settled(RolloutId(key), run.attempt, WorkerName(worker), FAILED)
            self.do(WorkerMessage(WorkerName(worker), settled))
            self.do(WorkerMessage(WorkerName(worker), settled))  # a duplicate changes nothing

    @rule(sent_run=sent_runs)
    def cancel(self, sent_run: tuple[bytes, str]) -> None:
        client, rollout_id = sent_run
        self.do(ClientMessage(client, Cancel(RolloutId(rollout_id), "x")))

    @rule(
        seconds=st.sampled_from([0.2, 0.9]), pings=st.sampled_from([CLIENT, OTHER, b"both"])
    )
    def tick(self, seconds: float, pings: bytes) -> None:
        for _ in range(8):
            self.now_s += seconds
            for client in (CLIENT, OTHER):
                if pings in (client, b"both"):
                    self.do(ClientMessage(client, Ping()))
            self.do(RouterTick(self.now_s))

    @rule(
        worker=workers,
        p99_s=st.sampled_from([0.0, 0.0, 1.0]),
        rss=st.sampled_from([1 << 28, 1 << 32]),
    )
    def send_stats(self, worker: str, p99_s: float, rss: int) -> None:
        if worker in self.running:
            message = ServerStats(ProcessStats(worker, LagStats(p99=p99_s), rss))
            self.do(WorkerMessage(WorkerName(worker), message))

    @invariant()
    def nothing_waits_while_there_is_room(self) -> None:
        dispatch = self.core._dispatch
        unit = [dispatch.open_runs[key] for key in dispatch.waiting.next_unit()]
        num_losses = max((run.num_losses for run in unit), default=0)
        assert not unit or self.core._pool.freest(len(unit), num_losses) is None

    @invariant()
    def each_is_answered_once_and_none_forgotten(self) -> None:
        assert not self.answered - self.sent, "answered twice"
        assert (self.sent - self.answered).total() == self.core.num_open

    @invariant()
    def a_rollout_runs_in_one_worker(self) -> None:
        running = [key for keys in self.running.values() for key in keys]
        assert len(running) == len(set(running))

    def teardown(self) -> None:
        """With one healthy worker everything ends."""
        self.running["last"] = {}
        self.do(WorkerMessage(WorkerName("last"), Hello("last", 1000)))
        for worker in list(self.running):
            while self.running.get(worker):
                self.finish_a_rollout(worker)
        assert self.answered == self.sent
        assert self.core.num_open == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
