"""The core's invariants, over random orders of settling, failing, publishing and applying."""

from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollway.orchestrator.core.commands import (
    CancelRollout,
    Credit,
    Discard,
    Dispatch,
    Finish,
    GiveUp,
    PullTasks,
    Release,
    Ship,
    UpdateWeights,
)
from rollway.orchestrator.core.core import Core, Limits
from rollway.orchestrator.core.events import (
    Credited,
    Started,
    TasksArrived,
    Tick,
    VersionPublished,
    WeightsApplied,
)
from rollway.orchestrator.core.tasks import TaskMix
from rollway.orchestrator.credit.baselines import grpo
from rollway.records.ids import PolicyVersion, RolloutId, Step, WorkerName
from rollway.records.payload import PayloadRef
from rollway.records.rollout import Cancelled, Failed, Outcome, RowSummary, Scored, Settled, Timing
from rollway.records.task import Task

GIBBERISH = 77
"""Tokens of a row that a filter leaves out."""


def limits(**changes: Any) -> Limits:
    defaults: dict[str, Any] = {
        "batch_size": 8,
        "group_size": 4,
        "max_in_flight": 16,
        "max_outstanding": 16,
        "max_off_policy_steps": 1,
        "max_fruitless_groups": 1000,
        "max_steps": 6,
        "micro_batch_tokens": 100,
        "payload_bytes": 1 << 30,
        "drop_zero_advantage": True,
    }
    return Limits(**{**defaults, **changes})


def scored(reward: float, version: int, number: int = 0) -> Scored:
    return Scored(
        reward=reward,
        rewards={"r": reward},
        metrics={},
        rows=(RowSummary(10, 5),),
        ref=PayloadRef("w0.0-0000.seg", 64 * number, 64),
        num_turns=1,
        stop="stop",
        first_version=PolicyVersion(version),
        last_version=PolicyVersion(version),
        timing=Timing(0, 0, 0, 0),
    )


class World(RuleBasedStateMachine):
    """Everything around the core: env servers, engine and trainer, each at its own pace."""

    @initialize(
        off_policy=st.integers(0, 2), group_size=st.integers(2, 4), in_flight=st.integers(4, 20),
        drop=st.booleans(), asks=st.booleans(), spare=st.integers(0, 40),
        num_tasks=st.one_of(st.none(), st.integers(1, 5)),
    )  # fmt: skip
    def begin(
        self,
        off_policy: int,
        group_size: int,
        in_flight: int,
        drop: bool,
        asks: bool,
        spare: int,
        num_tasks: int | None,
    ) -> None:
        batch = 2 * group_size
        self.limits = limits(
            batch_size=batch, group_size=group_size, max_in_flight=max(in_flight, group_size),
            max_outstanding=batch * (1 + off_policy), max_off_policy_steps=off_policy,
            drop_zero_advantage=drop, asks_for_credit=asks, payload_bytes=64 * (3 * batch + spare),
        )  # fmt: skip
        self.num_tasks = num_tasks
        self.limits = msgspec.structs.replace(
            self.limits, enforced=frozenset({"gibberish"}), patience_s=60
        )
        self.core = Core(self.limits, {"a": 3.0, "b": 1.0}, Step(1), {})
        self.running: dict[RolloutId, Dispatch] = {}
        self.settled: set[str] = set()
        self.held: dict[PayloadRef, str] = {}
        self.trained: list[str] = []
        self.queue: list[Ship] = []
        self.to_apply: list[int] = []
        self.to_credit: list[Credit] = []
        self.closed: list[int] = []
        self.dispatched: dict[str, int] = {"a": 0, "b": 0}
        self.engine = 0
        self.count = 0
        self.now_s = 1e5
        self.done = False
        self.hear(Started())

    def hear(self, event: Any) -> None:
        for command in self.core.on_event(event):
            self.obey(command)

    def obey(self, command: Any) -> None:
        match command:
            case PullTasks(env=env, start=start, count=count):
                end = start + count if self.num_tasks is None else min(start + count, self.num_tasks)
                tasks = tuple(Task(id=str(n), prompt="?") for n in range(start, end))
                self.hear(TasksArrived(env, start, tasks, exhausted=len(tasks) < count))
            case Dispatch(rollout_id=id):
                assert id not in self.running
                assert id not in self.settled
                assert command.version == self.engine, "dispatched under the version that samples"
                self.running[id] = command
                self.dispatched[command.env] += 1
            case CancelRollout(rollout_id=id):
                if id in self.running:
                    self.end(id, Cancelled("x"))
            case Credit(group_id=id, rewards=rewards):
                assert self.limits.asks_for_credit
                assert id not in self.closed
                assert len(rewards) == len(command.num_tokens) == len(command.num_turns) >= 2
                self.to_credit.append(command)
            case Ship(manifest=manifest, closed=closed):
                self.closed += [one.group.id for one in closed if one.fate == "trained"]
                self.check_batch(command)
                self.trained += dict.fromkeys(row.rollout_id for row in manifest.rows)
                self.queue.append(command)
                assert all(one.group.members for one in closed if one.fate == "trained")
            case Discard(closed=closed):
                self.closed.append(closed.group.id)
                for member in closed.group.members:
                    del self.held[member.scored.ref]
            case Release(refs=refs):
                for ref in refs:
                    del self.held[ref]
            case UpdateWeights(version=version):
                assert not self.to_apply, "one update at a time"
                self.to_apply.append(version)
            case Finish():
                self.done = True
            case GiveUp(reason=reason):
                raise AssertionError(reason)

    def check_batch(self, ship: Ship) -> None:
        manifest = ship.manifest
        assert {index for bin in manifest.micro_batches for index in bin} == set(
            range(len(manifest.rows))
        )
        groups = [one for one in ship.closed if one.fate == "trained"]
        for one in groups:
            assert abs(sum(one.advantages)) < 1e-9, "advantages of a group sum to zero"
            for member in one.group.members:
                staleness = manifest.trains_version - member.scored.first_version
                assert 0 <= staleness <= self.limits.max_off_policy_steps, "too stale to ship"
        for row in manifest.rows:
            assert row.ref in self.held, "a released ref is never read"
            assert row.num_tokens != GIBBERISH, "what a filter leaves out does not train"
        assert len({row.rollout_id for row in manifest.rows}) >= self.limits.batch_size

    def end(self, id: RolloutId, outcome: Outcome) -> None:
        del self.running[id]
        self.settled.add(id)
        settled = Settled(id, 1, WorkerName("w"), outcome)
        self.hear(settled)
        self.hear(settled)  # a duplicate changes nothing

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.0, 1.0]), bad=st.integers(0, 5))
    def score_one(self, data: st.DataObject, reward: float, bad: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        self.count += 1
        version = data.draw(st.integers(self.running[id].version, self.engine))
        outcome = scored(reward, version, self.count)
        if bad == 0:
            row = RowSummary(GIBBERISH, 4, ("gibberish",))
            outcome = msgspec.structs.replace(outcome, rows=(*outcome.rows, row))
        self.held[outcome.ref] = id
        self.end(id, outcome)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail_one(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))), Failed("env", "x"))

    @precondition(lambda self: self.to_credit)
    @rule(data=st.data())
    def credit(self, data: st.DataObject) -> None:
        """In any order, whatever else happens in between."""
        self.credit_one(data.draw(st.integers(0, len(self.to_credit) - 1)))

    def credit_one(self, at: int) -> None:
        order = self.to_credit.pop(at)
        credited = Credited(order.group_id, grpo(order.rewards))
        self.hear(credited)
        self.hear(credited)  # a duplicate changes nothing

    @precondition(lambda self: self.queue)
    @rule()
    def train(self) -> None:
        ship = self.queue.pop(0)
        self.hear(VersionPublished(PolicyVersion(ship.manifest.step), "path"))

    @precondition(lambda self: self.to_apply)
    @rule()
    def apply(self) -> None:
        self.engine = self.to_apply.pop()
        self.hear(WeightsApplied(PolicyVersion(self.engine)))

    @precondition(lambda self: not self.done)
    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.hear(Tick(self.now_s))

    @precondition(lambda self: self.done)
    @rule()
    def rest(self) -> None:
        """A finished run hears nothing more."""
        assert self.core.on_event(WeightsApplied(PolicyVersion(self.engine))) == []

    @invariant()
    def bounds_hold(self) -> None:
        if hasattr(self, "core"):
            assert len(self.running) <= self.limits.max_in_flight
            assert self.core.num_in_flight == len(self.running)
            assert len(self.trained) == len(set(self.trained)), "no rollout trains twice"
            assert len(self.closed) == len(set(self.closed)), "a group closes once"
            assert self.core.live_bytes == 64 * len(self.held), "live bytes are counted exactly"
            coming = self.limits.max_in_flight if not self.count else len(self.running)
            assert self.core.live_bytes <= self.limits.payload_bytes + 64 * coming

    def teardown(self) -> None:
        """When everybody keeps working the run finishes: nothing waits for what cannot happen."""
        if not hasattr(self, "core"):
            return
        for turn in range(20_000):
            if self.done:
                break
            if self.to_apply:
                self.apply()
            elif self.queue:
                self.train()
            elif self.to_credit:
                self.credit_one(0)
            else:
                assert self.running, "nothing runs, nothing trains, and the run is not done"
                id = min(self.running)
                self.count += 1
                outcome = scored(float(turn % 2), self.engine, self.count)
                self.held[outcome.ref] = id
                self.end(id, outcome)
        assert self.done
        assert not self.running, "every dispatched rollout settles"
        assert not self.to_credit, "every group that was asked about is closed"
        shipped = {m.scored.ref for ship in self.queue for one in ship.closed for m in one.group.members}
        waiting = {m.scored.ref for one in self.core._ready for m in one.group.members}
        assert set(self.held) <= shipped | waiting, "everything else was released"


TestWorld = World.TestCase
TestWorld.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


def play(core: Core, event: Any) -> list[Any]:
    return list(core.on_event(event))


def started(**changes: Any) -> tuple[Core, list[Dispatch]]:
    core = Core(limits(**changes), {"env": 1.0}, Step(1), {})
    (pull,) = play(core, Started())
    tasks = tuple(Task(id=str(n), prompt="?") for n in range(pull.count))
    commands = play(core, TasksArrived("env", 0, tasks))
    return core, [one for one in commands if isinstance(one, Dispatch)]


def settle(core: Core, order: Dispatch, outcome: Outcome) -> list[Any]:
    return play(core, Settled(order.rollout_id, 1, WorkerName("w"), outcome))


def test_synchronous_runs_wait_for_the_weights() -> None:
    core, orders = started(max_off_policy_steps=0, max_outstanding=8)
    assert len(orders) == 8
    commands = []
    for n, order in enumerate(orders):
        commands += settle(core, order, scored(n % 2, 0, n))
    (_ship,) = [one for one in commands if isinstance(one, Ship)]
    assert not [one for one in commands if isinstance(one, Dispatch)]
    commands = play(core, VersionPublished(PolicyVersion(1), "p"))
    assert [type(one) for one in commands] == [Release, UpdateWeights]
    commands = play(core, WeightsApplied(PolicyVersion(1)))
    again = [one for one in commands if isinstance(one, Dispatch)]
    assert {one.version for one in again} == {1}
    assert len(again) == 8
    assert {one.position for one in orders} == {1, 2}


def test_stale_rollouts_in_flight_are_cancelled_on_publish() -> None:
    core, orders = started(max_off_policy_steps=0, max_outstanding=16)
    commands = []
    for n, order in enumerate(orders[:8]):
        commands += settle(core, order, scored(n % 2, 0, n))
    assert [one for one in commands if isinstance(one, Ship)]
    commands = play(core, VersionPublished(PolicyVersion(1), "p"))
    cancelled = [one.rollout_id for one in commands if isinstance(one, CancelRollout)]
    assert cancelled == [order.rollout_id for order in orders[8:16]]


def test_a_partial_group_still_counts() -> None:
    core, orders = started()
    commands = settle(core, orders[0], Failed("env", "x"))
    for n, order in enumerate(orders[1:4]):
        commands += settle(core, order, scored(n % 2, 0, n))
    assert core.num_ready == 3


def test_credit_from_outside_is_what_trains() -> None:
    core, orders = started(asks_for_credit=True)
    commands = []
    for n, order in enumerate(orders[:8]):
        commands += settle(core, order, scored(1.0, 0, n))
    asked = [one for one in commands if isinstance(one, Credit)]
    assert [(one.rewards, one.num_tokens, one.num_turns) for one in asked] == [
        ((1.0,) * 4, (5,) * 4, (1,) * 4)
    ] * 2
    assert core.num_ready == 0
    mine = (3.0, -1.0, -1.0, -1.0)
    commands = play(core, Credited(asked[1].group_id, mine))
    commands += play(core, Credited(asked[0].group_id, (0.0,) * 4))
    (dropped,) = [one for one in commands if isinstance(one, Discard)]
    assert dropped.closed.fate == "zero_advantage"
    assert core.num_ready == 4
    for n, order in enumerate(orders[8:12]):
        commands += settle(core, order, scored(1.0, 0, 8 + n))
    (third,) = [one for one in commands if isinstance(one, Credit)]
    (ship,) = [one for one in play(core, Credited(third.group_id, mine)) if isinstance(one, Ship)]
    assert [row.advantage for row in ship.manifest.rows] == [*mine, *mine]


def test_flat_and_empty_groups_are_discarded_and_counted() -> None:
    core, orders = started()
    commands = []
    for n, order in enumerate(orders[:4]):
        commands += settle(core, order, scored(1.0, 0, n))
    for order in orders[4:8]:
        commands += settle(core, order, Failed("engine", "gone"))
    fates = [one.closed.fate for one in commands if isinstance(one, Discard)]
    assert fates == ["zero_advantage", "too_few"]
    assert [one for one in commands if isinstance(one, Dispatch)], "others take their place"


def test_a_run_that_gets_nowhere_gives_up_with_the_reason() -> None:
    core, orders = started(max_fruitless_groups=3)
    commands: list[Any] = []
    while not core.finished:
        order = orders.pop(0)
        new = settle(core, order, Failed("engine", "no engine at http://x"))
        orders += [one for one in new if isinstance(one, Dispatch)]
        commands += new
    (given_up,) = [one for one in commands if isinstance(one, GiveUp)]
    assert given_up.reason == (
        "3 groups in a row gave nothing to train on: 3 × engine: no engine at http://x"
    )


def test_dispatching_slows_down_before_the_payload_budget() -> None:
    core, orders = started(payload_bytes=64 * 20, max_in_flight=64, max_outstanding=64, batch_size=16)
    commands = []
    for n, order in enumerate(orders[:4]):
        commands += settle(core, order, scored(n % 2, 0, n))
    assert not [one for one in commands if isinstance(one, Dispatch)], "4 live + 60 coming is too much"
    held_back = False
    for order in orders[4:]:
        if [one for one in settle(core, order, Failed("env", "x")) if isinstance(one, Dispatch)]:
            break
        held_back = core.is_held_back
    assert held_back, "the budget was what kept it"
    assert core.num_in_flight == 16, "with 4 live and 12 coming there was room for one more group"


def test_a_budget_that_no_batch_fits_into_is_named() -> None:
    core, orders = started(payload_bytes=64 * 6, max_in_flight=4)
    commands: list[Any] = []
    while orders and not core.finished:
        order = orders.pop(0)
        new = settle(core, order, scored(len(commands) % 2, 0, len(commands)))
        orders += [one for one in new if isinstance(one, Dispatch)]
        commands += [order, *new]
    (given_up,) = [one for one in commands if isinstance(one, GiveUp)]
    assert "payload.budget_mb" in given_up.reason


def test_an_environment_without_tasks_is_named() -> None:
    core = Core(limits(), {"env": 1.0}, Step(1), {})
    play(core, Started())
    commands = play(core, TasksArrived("env", 0, (), exhausted=True))
    assert GiveUp("environment 'env' has no tasks") in commands


def test_the_cursor_wraps_where_the_tasks_end() -> None:
    """Also when their number is a multiple of what is pulled at a time."""
    mix = TaskMix({"env": 1.0}, {}, ahead=8)
    taken = []
    for _ in range(40):
        for pull in mix.pull():
            tasks = tuple(Task(id=str(n), prompt="?") for n in range(pull.start, 16))[: pull.count]
            mix.arrived("env", pull.start, tasks, exhausted=len(tasks) < pull.count)
        for pull in mix.pull():  # after an empty reply
            tasks = tuple(Task(id=str(n), prompt="?") for n in range(pull.start, 16))[: pull.count]
            mix.arrived("env", pull.start, tasks, exhausted=len(tasks) < pull.count)
        task = mix.take()
        assert task is not None
        assert task[2] == (int(task[1].id) + 1) % 16
        taken.append(int(task[1].id))
    assert taken == [n % 16 for n in range(40)]


def test_environments_are_mixed_by_ratio() -> None:
    core = Core(
        limits(max_in_flight=400, max_outstanding=400, batch_size=400), {"a": 3.0, "b": 1.0}, Step(1), {}
    )
    orders = []
    for pull in play(core, Started()):
        tasks = tuple(Task(id=str(n), prompt="?") for n in range(pull.count))
        orders += play(core, TasksArrived(pull.env, 0, tasks))
    envs = [one.env for one in orders if isinstance(one, Dispatch)]
    assert len(envs) == 400
    assert envs.count("a") == 300


def test_others_train_on_without_an_environment_that_never_answers() -> None:
    core = Core(
        limits(max_off_policy_steps=0, max_outstanding=8, patience_s=60, max_steps=3),
        {"dead": 1.0, "good": 1.0}, Step(1), {},
    )  # fmt: skip
    orders: list[Dispatch] = []
    for pull in play(core, Started()):
        tasks = tuple(Task(id=str(n), prompt="?") for n in range(100))
        orders += [one for one in play(core, TasksArrived(pull.env, 0, tasks)) if is_order(one)]
    play(core, Tick(1000.0))
    number = 0
    for second in range(1001, 1400, 10):
        commands = play(core, Tick(float(second)))
        for order in [one for one in orders if one.env == "good"]:
            number += 1
            commands += settle(core, order, scored(number % 2, core.applied_version, number))
        for ship in [one for one in commands if isinstance(one, Ship)]:
            version = PolicyVersion(ship.manifest.step)
            commands += play(core, VersionPublished(version, "p"))
            commands += play(core, WeightsApplied(version))
        orders = [one for one in commands if is_order(one)]
    assert core.next_step == 4, "all steps were shipped"
    assert core.silent_envs == ("dead",)


def is_order(command: Any) -> bool:
    return isinstance(command, Dispatch)
