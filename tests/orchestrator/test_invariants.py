"""The core's invariants, over random orders of settling, failing, publishing, applying and crashing."""

from collections import Counter
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.orchestrator.builders import Order, core_spec, orders_in, scored

from rollway.config.sections import DifficultyConfig, EvalConfig, FiltersConfig, RetriesConfig
from rollway.config.specs import CoreSpec
from rollway.orchestrator.core.batches.credit import grpo
from rollway.orchestrator.core.commands import (
    CancelRollout,
    Credit,
    DiscardGroup,
    Dispatch,
    Finish,
    GiveUp,
    PoolTask,
    PullTasks,
    RecordEvalGroup,
    ReleasePayload,
    ReportEval,
    Ship,
    UpdateWeights,
)
from rollway.orchestrator.core.core import Core
from rollway.orchestrator.core.events import (
    Credited,
    PayloadGrew,
    Started,
    TasksArrived,
    Tick,
    VersionPublished,
    WeightsApplied,
    WorkerLag,
)
from rollway.orchestrator.core.rollouts.evals import SHARE as EVAL_SHARE
from rollway.records.engine import EngineLoad
from rollway.records.ids import (
    GroupId,
    PolicyVersion,
    RolloutId,
    Step,
    WorkerName,
    num_retries,
)
from rollway.records.payload import PayloadRef
from rollway.records.restored import (
    KeptPayload,
    Restored,
    RestoredBatch,
    RestoredGroup,
    RestoredTask,
)
from rollway.records.rollout import Cancelled, Failed, Outcome, RowSummary, Scored, Settled
from rollway.records.task import Pool, Task

GIBBERISH = 77
"""Tokens of a row that a filter leaves out."""
EVALS = EvalConfig(every=2, num_tasks=3, num_rollouts=2)
RETRIES = RetriesConfig(engine=2, worker=1)
NO_RETRIES = RetriesConfig(engine=0, worker=0)
POOLS = DifficultyConfig(easy_at=1.0, hard_at=0.0)


class Written:
    """The ledger as the shell writes it: what survives a crash."""

    def __init__(self) -> None:
        self.groups: dict[GroupId, Order] = {}
        self.ids: dict[GroupId, list[RolloutId]] = {}
        self.ends: dict[RolloutId, Settled] = {}
        self.closed: set[GroupId] = set()
        self.pools: dict[tuple[str, str], tuple[Task, Pool]] = {}
        self.evaluated: int | None = None

    def dispatched(self, order: Order) -> None:
        self.groups[order.group_id] = order
        ids = self.ids.setdefault(order.group_id, [])
        if order.rollout_id not in ids:
            ids.append(order.rollout_id)
        self.ends.pop(order.rollout_id, None)

    def restored(self, unpublished: list[Ship]) -> Restored:
        """As a restart finds it: cancelled rollouts run again."""
        batches = [
            RestoredBatch(
                ship.manifest,
                tuple(closed for closed in ship.closed if closed.fate == "trained"),
            )
            for ship in unpublished
        ]
        shipped = {closed.group.id for batch in batches for closed in batch.closed}
        left = [
            order for id, order in sorted(self.groups.items())
            if id not in self.closed | shipped and order.split == "train"
        ]  # fmt: skip
        cursors = {
            order.env: order.position for _, order in sorted(self.groups.items())
            if order.split == "train"
        }  # fmt: skip
        return Restored(
            groups=tuple(self._group(order) for order in left),
            batches=tuple(batches),
            cursors=cursors,
            next_group=GroupId(max(self.groups, default=-1) + 1),
            pooled=tuple(
                RestoredTask(env, task, pool) for (env, _), (task, pool) in self.pools.items()
            ),
            evaluated=self.evaluated,
        )

    def _group(self, order: Order) -> RestoredGroup:
        ids = self.ids[order.group_id]
        ends = [self.ends[id] for id in ids if id in self.ends]
        usable = tuple(end for end in ends if not isinstance(end.outcome, Cancelled))
        return RestoredGroup(order.group_id, order.env, order.task, tuple(ids), usable)


NUM_HEARD: Counter[str] = Counter()
"""Events of all examples together."""


class World(RuleBasedStateMachine):
    """Everything around the core: env servers, engine and trainer, each at its own pace."""

    @initialize(
        off_policy=st.integers(0, 2), group_size=st.integers(2, 4), in_flight=st.integers(4, 20),
        flags=st.sets(st.sampled_from(
            ["drop", "asks", "evals", "retries", "pools", "cuts", "tokens", "adapts", "rate", "whole"]
        )),
        spare=st.integers(0, 40), num_tasks=st.one_of(st.none(), st.integers(1, 5)),
    )  # fmt: skip
    def begin(
        self, off_policy: int, group_size: int, in_flight: int, flags: set[str], spare: int,
        num_tasks: int | None,
    ) -> None:  # fmt: skip
        batch = 2 * group_size
        self.spec: CoreSpec = core_spec(
            batch_size=batch,
            group_size=group_size,
            max_in_flight=max(in_flight, group_size),
            max_outstanding=batch * (1 + off_policy),
            max_off_policy_steps=off_policy,
            filters=FiltersConfig(
                zero_advantage="enforce" if "drop" in flags else "monitor",
                gibberish="enforce",
            ),
            advantage="mine.py:credit" if "asks" in flags else "grpo",
            payload_bytes=64 * (3 * batch + spare + 2 * EVALS.num_rollouts),
            env_patience_s=60,
            eval=EVALS if "evals" in flags else None,
            retries=RETRIES if "retries" in flags else NO_RETRIES,
            difficulty=POOLS if "pools" in flags else DifficultyConfig(),
            stragglers_after=0.5 if "cuts" in flags else None,
            batch_tokens=10 * batch if "tokens" in flags else None,
            adapt_in_flight="adapts" in flags,
            rollouts_a_minute=200 if "rate" in flags else None,
            ratios={"a": 3.0, "b": 1.0},
        )
        self.settings = self.spec.orchestrator
        self.whole = frozenset("b") if "whole" in flags else frozenset[str]()
        self.num_tasks = num_tasks
        self.ledger = Written()
        self.trained: list[str] = []
        self.queue: list[Ship] = []
        self.published = 0
        self.saved = 0
        self.kept: list[KeptPayload] = []
        """The payload of trained batches that the trainer would read again after a crash."""
        self.count = 0
        self.now_s = 1e5
        self.done = False
        self.dead = False
        self.restart()

    def restart(self) -> None:
        """A new orchestrator, engine and trainer, from what was written."""
        restored = msgspec.structs.replace(
            self.ledger.restored(self.queue), kept=tuple(self.kept)
        )
        self.core = Core(self.spec, Step(self.published + 1), restored.cursors)
        self.running: dict[RolloutId, Order] = {}
        self.grown: dict[RolloutId, int] = {}
        self.settled = {end.rollout_id for group in restored.groups for end in group.settled}
        ends = [end.outcome for group in restored.groups for end in group.settled]
        members = [
            member
            for batch in restored.batches
            for closed in batch.closed
            for member in closed.group.members
        ]
        self.held: set[PayloadRef] = {end.ref for end in ends if isinstance(end, Scored)}
        self.held |= {member.scored.ref for member in members} | self.kept_refs
        self.to_apply: list[int] = []
        self.to_credit: list[Credit] = []
        self.engine = self.published
        self.hear(Started(restored, self.whole))
        self.most = max(self.settings.max_in_flight, len(self.running))
        """A restart runs again what is missing, be it more than otherwise would run at a time."""

    @property
    def kept_refs(self) -> set[PayloadRef]:
        return {ref for payload in self.kept for ref in payload.refs}

    def hear(self, event: Any) -> None:
        NUM_HEARD["events"] += 1
        for command in self.core.on_event(event):
            if self.dead:
                return  # killed while it was doing what it had decided
            self.obey(command)

    def obey(self, command: Any) -> None:
        match command:
            case PullTasks(env=env, start=start, count=count, split=split):
                end = (
                    start + count
                    if self.num_tasks is None
                    else min(start + count, self.num_tasks)
                )
                tasks = tuple(Task(id=str(n), prompt="?") for n in range(start, end))
                self.hear(
                    TasksArrived(env, start, tasks, exhausted=len(tasks) < count, split=split)
                )
            case Dispatch():
                for order in orders_in([command]):
                    self.start(order)
            case CancelRollout(rollout_id=id):
                if id in self.running:
                    self.end(id, Cancelled("x"))
            case Credit(group_id=id, rewards=rewards):
                assert self.settings.advantage != "grpo"
                assert id not in self.ledger.closed
                assert len(rewards) == len(command.num_tokens) == len(command.num_turns) >= 2
                self.to_credit.append(command)
            case Ship():
                self.check_batch(command)
                self.trained += dict.fromkeys(row.rollout_id for row in command.manifest.rows)
                self.queue.append(command)
            case DiscardGroup(closed=closed):
                assert closed.group.id not in self.ledger.closed, "a group closes once"
                self.ledger.closed.add(closed.group.id)
                self.held -= {member.scored.ref for member in closed.group.members}
            case ReleasePayload(refs=refs):
                assert self.held >= set(refs)
                self.held -= set(refs)
            case PoolTask(env=env, task=task, pool=pool):
                self.ledger.pools.pop((env, task.id), None)
                if pool is not None:
                    self.ledger.pools[env, task.id] = (task, pool)
            case RecordEvalGroup(closed=closed):
                self.held -= {member.scored.ref for member in closed.group.members}
            case ReportEval(version=version, closed=groups):
                most = EVALS.num_tasks if self.num_tasks is None else min(3, self.num_tasks)
                assert len(groups) <= 2 * most
                self.ledger.evaluated = version
            case UpdateWeights(version=version):
                assert not self.to_apply, "one update at a time"
                self.to_apply.append(version)
            case Finish():
                self.done = True
            case GiveUp(reason=reason):
                raise AssertionError(reason)

    def start(self, order: Order) -> None:
        id = order.rollout_id
        assert id not in self.running
        assert id not in self.settled
        assert order.version == self.engine, "dispatched under the version that samples"
        if num_retries(id):
            assert order.env not in self.whole, "what runs as one cannot run again in part"
            assert num_retries(id) <= 2
        self.running[id] = order
        self.ledger.dispatched(order)

    def check_batch(self, ship: Ship) -> None:
        manifest = ship.manifest
        bins = [index for rows in manifest.micro_batches for index in rows]
        assert sorted(bins) == list(range(len(manifest.rows)))
        for closed in ship.closed:
            if closed.fate != "trained":
                continue
            assert abs(sum(closed.advantages)) < 1e-9, "advantages of a group sum to zero"
            assert self.ledger.groups[closed.group.id].split == "train", (
                "evaluations never train"
            )
            for member in closed.group.members:
                staleness = manifest.trains_version - member.scored.first_version
                assert 0 <= staleness <= self.settings.max_off_policy_steps, (
                    "too stale to ship"
                )
        for row in manifest.rows:
            assert row.ref in self.held, "a released ref is never read"
            assert row.num_tokens != GIBBERISH, "what a filter leaves out does not train"
        if self.settings.batch_tokens:
            assert manifest.num_tokens >= self.settings.batch_tokens
        else:
            assert len({row.rollout_id for row in manifest.rows}) >= self.settings.batch_size

    def end(self, id: RolloutId, outcome: Outcome) -> None:
        """The ledger hears of it first."""
        del self.running[id]
        self.grown.pop(id, None)
        self.settled.add(id)
        settled = Settled(id, 1, WorkerName("w"), outcome)
        self.ledger.ends[id] = settled
        if isinstance(outcome, Scored):
            self.held.add(outcome.ref)
        self.hear(settled)
        if not self.dead:
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
        self.end(id, outcome)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(0, 1000))
    def grow(self, data: st.DataObject, size: int) -> None:
        """A report may also name a rollout that has settled."""
        id = data.draw(st.sampled_from(sorted(self.running)))
        self.grown[id] = size
        self.hear(PayloadGrew({id: size, **dict.fromkeys(self.settled, 7)}))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), boundary=st.sampled_from(["env", "engine", "worker"]))
    def fail_one(self, data: st.DataObject, boundary: Any) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))), Failed(boundary, "x"))

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
    @rule(saves=st.booleans())
    def train(self, saves: bool = True) -> None:
        """The trainer can restart from some versions. What it needs for the others is kept."""
        ship = self.queue.pop(0)
        version = PolicyVersion(ship.manifest.step)
        self.published = version
        trained = [closed for closed in ship.closed if closed.fate == "trained"]
        self.ledger.closed |= {closed.group.id for closed in trained}
        refs = tuple(ref for closed in trained for ref in closed.refs)
        self.kept.append(KeptPayload(version, refs))
        if saves or version == self.spec.max_steps:
            self.saved = version
        self.kept = [payload for payload in self.kept if payload.version > self.saved]
        self.hear(VersionPublished(version, "path", PolicyVersion(self.saved)))
        assert self.held >= self.kept_refs

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

    @rule(running=st.integers(0, 20), waiting=st.integers(0, 20), use=st.floats(0, 1))
    def load(self, running: int, waiting: int, use: float) -> None:
        self.hear(WorkerLag(use / 5))
        self.hear(EngineLoad(running, waiting, use))
        assert (
            self.settings.group_size
            <= self.core.admission.concurrency.limit
            <= self.settings.max_in_flight
        )

    @precondition(lambda self: not self.done)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Killed between two events, or after an event was written down and before anything came of
        it."""
        if self.running and data.draw(st.booleans()):
            self.dead = True
            self.count += 1
            id = data.draw(st.sampled_from(sorted(self.running)))
            self.end(id, scored(float(self.count % 2), self.running[id].version, self.count))
            self.dead = False
        self.restart()

    @precondition(lambda self: self.done)
    @rule()
    def rest(self) -> None:
        """A finished run hears nothing more."""
        assert self.core.on_event(WeightsApplied(PolicyVersion(self.engine))) == []

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "core"):
            return
        assert self.core.num_in_flight == len(self.running) <= self.most
        assert len(self.trained) == len(set(self.trained)), "no rollout trains twice"
        assert self.core.admission.budget.live_bytes == 64 * len(
            self.held - self.kept_refs
        ), "live bytes are counted exactly"
        running = self.core.admission.budget.num_bytes - self.core.admission.budget.live_bytes
        assert running == sum(self.grown.values()), "and those of running rollouts"
        evals = sum(order.split == "eval" for order in self.running.values())
        share = EVAL_SHARE if self.settings.max_off_policy_steps else 1.0
        assert evals <= max(EVALS.num_rollouts, share * self.settings.max_in_flight)

    def teardown(self) -> None:
        """When everybody keeps working the run finishes: nothing waits for what cannot happen."""
        if not hasattr(self, "core"):
            return
        for number in range(20_000):
            if self.done:
                break
            self.make_progress(number)
        assert self.done
        assert not self.running, "every dispatched rollout settles"
        assert not self.to_credit, "every group that was asked about is closed"
        assert self.published == self.spec.max_steps
        if self.spec.eval is not None:
            assert self.ledger.evaluated == self.spec.max_steps, (
                "the last version is evaluated"
            )
        waiting = {
            member.scored.ref
            for closed in self.core.shipping.ready._groups
            for member in closed.group.members
        }
        assert self.held <= waiting, "everything else was released"

    def make_progress(self, number: int) -> None:
        if self.to_apply:
            self.apply()
        elif self.queue:
            self.train()
        elif self.to_credit:
            self.credit_one(0)
        elif not self.running:
            assert self.settings.rollouts_a_minute, "nothing runs, nothing trains"
            self.wait(1000)  # the first after a restart only says what time it is
            self.wait(1000)
            assert self.running or self.done, "nothing starts though time has passed"
        else:
            self.count += 1
            self.end(min(self.running), scored(float(number % 2), self.engine, self.count))


def test_invariants_hold_over_many_events() -> None:
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=450, stateful_step_count=60, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )  # fmt: skip
    assert NUM_HEARD["events"] >= 100_000
