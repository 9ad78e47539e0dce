"""The core's rules, one by one."""

from typing import Any

import msgspec
import pytest
from tests.orchestrator.builders import Order, core_spec, orders_in, scored

from rollway.config.sections import (
    DifficultyConfig,
    EvalConfig,
    LengthPenaltyConfig,
    RetriesConfig,
)
from rollway.orchestrator.core.commands import (
    CancelRollout,
    Credit,
    DiscardGroup,
    Finish,
    GiveUp,
    PoolTask,
    PullTasks,
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
from rollway.orchestrator.core.rollouts.patience import MAX_QUIET_S
from rollway.orchestrator.core.rollouts.tasks import TaskMix
from rollway.orchestrator.core.state import needs_engine, silent_envs
from rollway.records.engine import EngineLoad
from rollway.records.ids import PolicyVersion, Step, WorkerName
from rollway.records.rollout import Cancelled, Failed, Outcome, RowSummary, Settled
from rollway.records.task import Task


def play(core: Core, event: Any) -> list[Any]:
    return list(core.on_event(event))


def tasks(count: int, start: int = 0) -> tuple[Task, ...]:
    return tuple(Task(id=str(number), prompt="?") for number in range(start, count))


def of_kind(kind: type, commands: list[Any]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


def new_core(**changes: Any) -> Core:
    return Core(core_spec(**changes), Step(1), {})


def started(**changes: Any) -> tuple[Core, list[Order]]:
    core = new_core(**changes)
    (pull,) = [
        pull for pull in of_kind(PullTasks, play(core, Started())) if pull.split == "train"
    ]
    return core, orders_in(play(core, TasksArrived("env", 0, tasks(pull.count))))


def settle(core: Core, order: Order, outcome: Outcome) -> list[Any]:
    return play(core, Settled(order.rollout_id, 1, WorkerName("w"), outcome))


def test_synchronous_runs_wait_for_the_weights() -> None:
    core, orders = started(max_off_policy_steps=0, max_outstanding=8)
    assert len(orders) == 8
    commands = []
    for n, order in enumerate(orders):
        commands += settle(core, order, scored(n % 2, 0, n))
    (_ship,) = of_kind(Ship, commands)
    assert not orders_in(commands)
    commands = play(core, VersionPublished(PolicyVersion(1), "p"))
    assert [type(command) for command in commands] == [ReleasePayload, UpdateWeights]
    commands = play(core, WeightsApplied(PolicyVersion(1)))
    again = orders_in(commands)
    assert {order.version for order in again} == {1}
    assert len(again) == 8
    assert {order.position for order in orders} == {1, 2}


def test_stale_rollouts_in_flight_are_cancelled_on_publish() -> None:
    core, orders = started(max_off_policy_steps=0, max_outstanding=16)
    commands = []
    for n, order in enumerate(orders[:8]):
        commands += settle(core, order, scored(n % 2, 0, n))
    assert of_kind(Ship, commands)
    commands = play(core, VersionPublished(PolicyVersion(1), "p"))
    cancelled = [cancel.rollout_id for cancel in of_kind(CancelRollout, commands)]
    assert cancelled == [order.rollout_id for order in orders[8:16]]


def test_a_partial_group_still_counts() -> None:
    core, orders = started()
    commands = settle(core, orders[0], Failed("env", "x"))
    for n, order in enumerate(orders[1:4]):
        commands += settle(core, order, scored(n % 2, 0, n))
    assert core.shipping.ready.num_rollouts == 3


def test_credit_from_outside_is_what_trains() -> None:
    core, orders = started(advantage="mine.py:credit")
    commands = []
    for n, order in enumerate(orders[:8]):
        commands += settle(core, order, scored(1.0, 0, n))
    asked = of_kind(Credit, commands)
    assert [(ask.rewards, ask.num_tokens, ask.num_turns) for ask in asked] == [
        ((1.0,) * 4, (5,) * 4, (1,) * 4)
    ] * 2
    assert core.shipping.ready.num_rollouts == 0
    mine = (3.0, -1.0, -1.0, -1.0)
    commands = play(core, Credited(asked[1].group_id, mine))
    commands += play(core, Credited(asked[0].group_id, (0.0,) * 4))
    (dropped,) = of_kind(DiscardGroup, commands)
    assert dropped.closed.fate == "zero_advantage"
    assert core.shipping.ready.num_rollouts == 4
    for n, order in enumerate(orders[8:12]):
        commands += settle(core, order, scored(1.0, 0, 8 + n))
    (third,) = of_kind(Credit, commands)
    (ship,) = of_kind(Ship, play(core, Credited(third.group_id, mine)))
    assert [row.advantage for row in ship.manifest.rows] == [*mine, *mine]


def test_flat_and_empty_groups_are_discarded_and_counted() -> None:
    core, orders = started()
    commands = []
    for n, order in enumerate(orders[:4]):
        commands += settle(core, order, scored(1.0, 0, n))
    for order in orders[4:8]:
        commands += settle(core, order, Failed("engine", "gone"))
    fates = [discard.closed.fate for discard in of_kind(DiscardGroup, commands)]
    assert fates == ["zero_advantage", "too_few"]
    assert orders_in(commands), "others take their place"


def test_a_run_that_gets_nowhere_gives_up_with_the_reason() -> None:
    core, orders = started(max_useless_groups=3)
    commands: list[Any] = []
    while not core.finished:
        order = orders.pop(0)
        new = settle(core, order, Failed("engine", "no engine at http://x"))
        orders += orders_in(new)
        commands += new
    (given_up,) = of_kind(GiveUp, commands)
    assert given_up.reason == (
        "3 groups in a row gave nothing to train on: 3 × engine: no engine at http://x"
    )


NO_DISK = Failed(
    "worker", "cannot write 10 bytes to /run: No space left on device; make room"
)


def test_groups_that_failed_for_lack_of_disk_do_not_end_a_run() -> None:
    core, orders = started(max_useless_groups=3)
    commands = [command for order in orders for command in settle(core, order, NO_DISK)]
    assert len(of_kind(DiscardGroup, commands)) == 4
    assert not core.finished


def test_nothing_starts_on_a_full_disk_and_everything_once_there_is_room() -> None:
    config = EvalConfig(every=1, num_tasks=1, num_rollouts=4)
    core = new_core(eval=config, max_useless_groups=3)
    commands = play(core, Tick(0.0, has_room=False)) + play(core, Started())
    pulls = of_kind(PullTasks, commands)
    assert {pull.split for pull in pulls} == {"train", "eval"}
    for pull in pulls:
        arrived = TasksArrived("env", 0, tasks(pull.count), split=pull.split)
        assert not orders_in(play(core, arrived))
    assert core.view().waits_for == "room on the disk of the run"
    for now_s in (MAX_QUIET_S, 3 * MAX_QUIET_S):
        assert not play(core, Tick(now_s, has_room=False)), (
            "a run waits for room for any time"
        )
    orders = orders_in(play(core, Tick(3 * MAX_QUIET_S + 1)))
    assert {order.split for order in orders} == {"train", "eval"}


def test_dispatching_slows_down_before_the_payload_budget() -> None:
    core, orders = started(
        payload_bytes=64 * 20, max_in_flight=64, max_outstanding=64, batch_size=16
    )
    commands = []
    for number, order in enumerate(orders[:4]):
        commands += settle(core, order, scored(number % 2, 0, number))
    assert not orders_in(commands), "4 live and 60 coming is too much"
    held_back = False
    for order in orders[4:]:
        if orders_in(settle(core, order, Failed("env", "x"))):
            break
        held_back = core.admission.is_held_back
    assert held_back, "the budget alone kept the group from starting"
    assert core.num_in_flight == 16, (
        "with 4 live and 12 coming there was room for one more group"
    )


def test_what_running_rollouts_have_brought_counts_against_the_budget() -> None:
    core, orders = started(payload_bytes=64 * 40, max_in_flight=16, max_outstanding=64)
    play(core, PayloadGrew({orders[0].rollout_id: 64 * 30, orders[1].rollout_id: 64 * 12}))
    assert core.view().live_bytes == 64 * 42
    for order in orders[4:8]:
        assert not orders_in(settle(core, order, Failed("env", "x"))), "all room is taken"
    assert core.admission.is_held_back
    assert orders_in(settle(core, orders[0], Failed("env", "x"))), "what it brought is gone"


def test_a_budget_that_no_batch_fits_into_is_named() -> None:
    core, orders = started(payload_bytes=64 * 6, max_in_flight=4)
    commands: list[Any] = []
    while orders and not core.finished:
        order = orders.pop(0)
        new = settle(core, order, scored(len(commands) % 2, 0, len(commands)))
        orders += orders_in(new)
        commands += [order, *new]
    (given_up,) = of_kind(GiveUp, commands)
    assert "payload.budget_mb" in given_up.reason


def test_an_environment_without_tasks_is_named() -> None:
    core = new_core()
    play(core, Started())
    commands = play(core, TasksArrived("env", 0, (), exhausted=True))
    assert GiveUp("environment 'env' has no tasks") in commands


def new_mix(ratios: dict[str, float], ahead: int) -> TaskMix:
    return TaskMix(ratios, {}, ahead, DifficultyConfig())


def test_tasks_start_over_after_the_last_one() -> None:
    """Also when their number is a multiple of what is pulled at a time."""
    mix = new_mix({"env": 1.0}, ahead=8)
    taken = []
    for _ in range(40):
        for _ in range(2):  # the second time after an empty reply
            for pull in mix.pull():
                page = tasks(16, pull.start)[: pull.count]
                mix.arrived(TasksArrived("env", pull.start, page, len(page) < pull.count))
        env_and_task = mix.take()
        assert env_and_task is not None
        number = int(env_and_task[1].id)
        assert mix.position("env") == (number + 1) % 16
        taken.append(number)
    assert taken == [number % 16 for number in range(40)]


def test_environments_are_mixed_by_ratio() -> None:
    core = new_core(
        max_in_flight=400, max_outstanding=400, batch_size=400, ratios={"a": 3.0, "b": 1.0}
    )
    commands: list[Any] = []
    for pull in play(core, Started()):
        commands += play(core, TasksArrived(pull.env, 0, tasks(pull.count)))
    envs = [order.env for order in orders_in(commands)]
    assert len(envs) == 400
    assert envs.count("a") == 300


@pytest.mark.parametrize("answers_cancels", [False, True])
def test_others_train_without_an_environment_that_never_answers(
    answers_cancels: bool,
) -> None:
    """Cancelling its stale rollouts does not count as an answer."""
    core = new_core(
        max_off_policy_steps=0,
        max_outstanding=8,
        env_patience_s=60,
        max_steps=1000,
        ratios={"dead": 1.0, "good": 1.0},
    )
    orders: list[Order] = []
    for pull in play(core, Started()):
        orders += orders_in(play(core, TasksArrived(pull.env, 0, tasks(100))))
    number = 0
    for second in range(1001, 1400, 10):
        commands = play(core, Tick(float(second)))
        for order in orders:
            if order.env == "good":
                number += 1
                commands += settle(
                    core, order, scored(number % 2, core.weights.applied, number)
                )
        for ship in of_kind(Ship, commands):
            version = PolicyVersion(ship.manifest.step)
            commands += play(core, VersionPublished(version, "p"))
            for cancel in of_kind(CancelRollout, commands) if answers_cancels else []:
                end = Settled(cancel.rollout_id, 1, WorkerName("w"), Cancelled("stale"))
                commands += play(core, end)
            commands += play(core, WeightsApplied(version))
        orders = orders_in(commands)
    assert core.shipping.next_step > 5
    assert silent_envs(core) == ("dead",)


def test_a_rollout_that_the_engine_failed_runs_again() -> None:
    core, orders = started(retries=RetriesConfig(engine=2))
    (again,) = orders_in(settle(core, orders[0], Failed("engine", "gone")))
    assert (again.rollout_id, again.group_id, again.task) == ("g0.0+1", 0, orders[0].task)
    (again,) = orders_in(settle(core, again, Failed("engine", "gone")))
    assert again.rollout_id == "g0.0+2"
    assert not orders_in(settle(core, again, Failed("engine", "gone"))), "twice is enough"
    assert not orders_in(settle(core, orders[1], Failed("env", "x"))), (
        "the environment's own fault"
    )
    assert core.retries.num_retries == 2
    for number, order in enumerate(orders[2:4]):
        settle(core, order, scored(number, 0, number))
    assert core.shipping.ready.num_rollouts == 2, (
        "the group closes without the two that failed"
    )


@pytest.mark.parametrize("boundary", ["scorer", "deadline"])
def test_a_failed_reward_or_a_passed_deadline_is_final(boundary: Any) -> None:
    core, orders = started(retries=RetriesConfig(env=9, engine=9, worker=9))
    assert not orders_in(settle(core, orders[0], Failed(boundary, "x")))


def test_retries_stay_within_a_tenth_of_the_rollouts() -> None:
    core, orders = started(
        retries=RetriesConfig(engine=100),
        max_in_flight=400,
        max_outstanding=400,
        batch_size=400,
    )
    assert len(orders) == 400
    again = [
        retry
        for index, order in enumerate(orders)
        for retry in orders_in(settle(core, order, Failed("engine", "xy"[index % 2])))
    ]
    num_first = len(orders) + sum("+" not in order.rollout_id for order in again)
    assert 40 <= core.retries.num_retries <= num_first / 10 + 1


def test_a_group_that_needs_one_worker_is_not_run_again_in_part() -> None:
    core = new_core(retries=RetriesConfig(engine=2))
    play(core, Started(whole_groups=frozenset({"env"})))
    orders = orders_in(play(core, TasksArrived("env", 0, tasks(100))))
    assert not settle(core, orders[0], Failed("engine", "gone"))


def test_stragglers_are_cancelled_once_most_of_their_group_has_settled() -> None:
    core, orders = started(stragglers_after=0.75)
    play(core, Tick(1000.0))
    for number, order in enumerate(orders[:2]):
        settle(core, order, scored(number, 0, number))
    assert not play(core, Tick(1100.0)), "half of them is not enough"
    settle(core, orders[2], scored(0, 0, 2))
    assert not play(core, Tick(1129.0))
    (cancel,) = play(core, Tick(1130.0))
    assert isinstance(cancel, CancelRollout)
    assert cancel.rollout_id == orders[3].rollout_id
    assert not play(core, Tick(1200.0)), "once is enough"


def test_a_batch_by_tokens_ships_when_it_has_enough_tokens() -> None:
    core, orders = started(
        batch_tokens=100, batch_size=8, max_outstanding=64, max_in_flight=64
    )
    ships: list[Ship] = []
    for number, order in enumerate(orders):
        ships += of_kind(Ship, settle(core, order, scored(number % 2, 0, number)))
        if ships:
            break
    assert len(ships[0].manifest.rows) == 12, "groups of 4, with 10 tokens in each rollout"
    assert core.shipping.ready.rollouts_a_batch == 10


def test_no_more_rollouts_start_than_a_minute_allows() -> None:
    core, orders = started(rollouts_a_minute=8, max_in_flight=64, max_outstanding=64)
    assert len(orders) == 4, "one group starts, and its part of a minute has to pass"
    assert not orders_in(play(core, Tick(1000.0)))
    assert not orders_in(play(core, Tick(1029.0)))
    assert len(orders_in(play(core, Tick(1030.0)))) == 4
    assert len(orders_in(play(core, Tick(2000.0)))) == 4, (
        "minutes that were not used are gone"
    )


def test_fewer_run_while_the_engine_is_overloaded() -> None:
    core, orders = started(
        adapt_in_flight=True, max_in_flight=40, max_outstanding=80, batch_size=80
    )
    concurrency = core.admission.concurrency
    assert len(orders) == 4, "one group of one worker"
    for limit in (8, 16, 32, 40):
        play(core, EngineLoad(running=4, waiting=0, cache_use=0.5))
        assert concurrency.limit == limit
    play(core, EngineLoad(running=10, waiting=30, cache_use=0.5))
    assert concurrency.limit == 36
    play(core, EngineLoad(running=30, waiting=0, cache_use=0.99))
    assert concurrency.limit == 32
    play(core, EngineLoad(running=30, waiting=3, cache_use=0.5))
    assert concurrency.limit == 32, "neither too much nor too little"
    play(core, WorkerLag(0.3))
    play(core, EngineLoad(running=30, waiting=0, cache_use=0.5))
    assert concurrency.limit == 28, "workers are late"
    play(core, EngineLoad(running=30, waiting=0, cache_use=0.5))
    assert concurrency.limit == 32


def test_a_solved_task_is_drawn_rarely_until_it_fails_again() -> None:
    core = new_core(
        difficulty=DifficultyConfig(easy_at=1.0),
        max_in_flight=4,
        max_outstanding=10**5,
        batch_size=10**5,
        max_useless_groups=10**6,
    )
    three = tasks(3)
    play(core, Started())
    commands = play(core, TasksArrived("env", 0, three, exhausted=True))
    solved = {"0"}
    seen: list[str] = []
    moves: list[tuple[str, str | None]] = []
    for number in range(800):
        if number == 400:
            solved = set()
        pulls, pending, commands = of_kind(PullTasks, commands), orders_in(commands), []
        for pull in pulls:
            commands += play(
                core, TasksArrived("env", pull.start, three[pull.start :], exhausted=True)
            )
        pending += orders_in(commands)
        task_id = pending[0].task.id
        seen.append(task_id)
        for member, order in enumerate(pending):
            reward = 1.0 if task_id in solved else member % 2
            commands += settle(core, order, scored(reward, 0, 4 * number + member))
        moves += [(command.task.id, command.pool) for command in of_kind(PoolTask, commands)]
    assert moves == [("0", "easy"), ("0", None)]
    assert 0.03 < seen[10:400].count("0") / 390 < 0.08, "a twentieth of the groups, no more"
    assert seen[450:].count("0") / 350 > 0.3, "one of three again"


EVAL = EvalConfig(every=2, num_tasks=3, num_rollouts=2)


def test_evaluations_run_beside_training_within_their_share() -> None:
    core = new_core(eval=EVAL)
    pulls = of_kind(PullTasks, play(core, Started()))
    assert [(pull.split, pull.count) for pull in pulls] == [("eval", 3), ("train", 8)]
    first = orders_in(play(core, TasksArrived("env", 0, tasks(3), split="eval")))
    assert [order.split for order in first] == ["eval"] * 4, "two tasks: a quarter of 16"
    train = orders_in(play(core, TasksArrived("env", 0, tasks(8))))
    assert {order.split for order in train} == {"train"}
    assert core.num_in_flight == 16
    commands: list[Any] = []
    for number, order in enumerate(first):
        commands += settle(core, order, scored(1.0, 0, number))
    last = [order for order in orders_in(commands) if order.split == "eval"]
    assert not of_kind(ReportEval, commands)
    for number, order in enumerate(last):
        commands += settle(core, order, scored(0.0, 0, 10 + number))
    (report,) = of_kind(ReportEval, commands)
    assert report.version == 0
    assert [len(closed.group.members) for closed in report.closed] == [2, 2, 2]
    assert core.shipping.ready.num_rollouts == 0, "nothing of it trains"
    assert core.admission.budget.live_bytes == 0, "nothing of it is kept"


def test_an_evaluation_ends_if_its_environment_falls_silent_before_it_starts() -> None:
    core = new_core(eval=EVAL, max_in_flight=4, env_patience_s=60)
    play(core, Started())
    play(core, Tick(0.0))
    assert orders_in(play(core, TasksArrived("env", 0, tasks(8)))), (
        "training fills what may run"
    )
    assert not orders_in(play(core, TasksArrived("env", 0, tasks(3), split="eval")))
    (report,) = of_kind(ReportEval, play(core, Tick(61.0)))
    assert (report.version, report.closed) == (0, ())


def test_an_evaluation_does_not_wait_for_tasks_of_a_silent_environment() -> None:
    config = EvalConfig(every=1, num_tasks=100, num_rollouts=2)
    core = new_core(eval=config, env_patience_s=60)
    play(core, Started())
    play(core, Tick(0.0))
    (report,) = of_kind(ReportEval, play(core, Tick(61.0)))
    assert (report.version, report.closed) == (0, ())
    page = TasksArrived("env", 0, tasks(64), split="eval")
    assert not play(core, page), "nothing waits for these tasks any more"
    assert of_kind(PullTasks, play(core, WeightsApplied(PolicyVersion(1))))
    assert of_kind(PullTasks, play(core, page)) == [PullTasks("env", 64, 36, "eval")]
    assert not of_kind(PullTasks, play(core, page)), "the answer to the older request"


def test_the_last_version_is_evaluated_before_the_run_ends() -> None:
    core, orders = started(max_steps=1, max_outstanding=8, eval=EVAL)
    one_task = tasks(1)
    for number, order in enumerate(
        orders_in(play(core, TasksArrived("env", 0, one_task, True, "eval")))
    ):
        settle(core, order, scored(1.0, 0, 200 + number))
    for number, order in enumerate(orders):
        settle(core, order, scored(number % 2, 0, number))
    commands = play(core, VersionPublished(PolicyVersion(1), "p"))
    assert of_kind(UpdateWeights, commands)
    assert not core.finished
    assert needs_engine(core), "the last version is not evaluated yet"
    (pull,) = play(core, WeightsApplied(PolicyVersion(1)))
    assert needs_engine(core), "its evaluation runs"
    assert pull == PullTasks("env", 0, 3, "eval")
    evals = orders_in(play(core, TasksArrived("env", 0, one_task, True, "eval")))
    for number, order in enumerate(evals):
        commands = settle(core, order, scored(1.0, 1, 100 + number))
    assert [type(command) for command in commands][-2:] == [ReportEval, Finish]
    assert not needs_engine(core)


def test_a_run_in_which_nothing_happens_stops_and_says_what_it_waited_for() -> None:
    core, _orders = started()
    play(core, Tick(1000.0))
    assert not play(core, Tick(1000.0 + MAX_QUIET_S - 1))
    (given_up,) = play(core, Tick(1000.0 + MAX_QUIET_S))
    assert isinstance(given_up, GiveUp)
    assert "nothing has happened for 3600 s: step 1 waits for rollouts" in given_up.reason


def test_the_view_shows_what_the_step_waits_for() -> None:
    core, orders = started()
    assert (core.view().waits_for, core.view().in_flight) == ("rollouts", 16)
    for number, order in enumerate(orders[:4]):
        settle(core, order, scored(number % 2, 0, number))
    assert (core.view().ready, core.view().batch_size, core.view().step) == (4, 8, 1)
    assert core.view().live_bytes == 4 * 64


def test_an_advantage_function_is_not_asked_about_a_group_of_one() -> None:
    core, orders = started(advantage="mine.py:credit")
    commands: list[Any] = []
    for order in orders[:3]:
        commands += settle(core, order, Failed("env", "x"))
    commands += settle(core, orders[3], scored(1.0, 0))
    (discard,) = of_kind(DiscardGroup, commands)
    assert discard.closed.fate == "too_few"


@pytest.mark.parametrize(("by", "shortest"), [("tokens", 1), ("turns", 0)])
def test_the_length_penalty_counts_tokens_or_turns(by: Any, shortest: int) -> None:
    penalty = LengthPenaltyConfig(weight=0.5, by=by)
    core, orders = started(
        length_penalty=penalty, group_size=2, batch_size=2, max_outstanding=2
    )
    lengths = [
        {"num_turns": 1, "rows": (RowSummary(90, 80),)},
        {"num_turns": 3, "rows": (RowSummary(9, 8),)},
    ]
    commands: list[Any] = []
    for number, (order, length) in enumerate(zip(orders, lengths, strict=True)):
        outcome = msgspec.structs.replace(scored(1.0, 0, number), **length)
        commands += settle(core, order, outcome)
    (ship,) = of_kind(Ship, commands)
    advantages = [row.advantage for row in ship.manifest.rows]
    assert advantages.index(max(advantages)) == shortest
    assert advantages == pytest.approx([-0.25, 0.25] if shortest else [0.25, -0.25])


def test_shares_follow_what_trains_not_what_was_tried() -> None:
    """Half of the groups of b teach nothing, so b gets twice as many."""
    mix = new_mix({"a": 3.0, "b": 1.0}, ahead=2000)
    for pull in mix.pull():
        mix.arrived(TasksArrived(pull.env, 0, tasks(2000)))
    trained = {"a": 0, "b": 0}
    for number in range(1000):
        taken = mix.take()
        assert taken is not None
        if taken[0] == "b" and number % 2:
            mix.did_not_train("b")
        else:
            trained[taken[0]] += 1
    assert abs(trained["a"] / trained["b"] - 3) < 0.1


def test_an_environment_whose_groups_never_train_does_not_take_everything() -> None:
    mix = new_mix({"a": 1.0, "b": 1.0}, ahead=2000)
    for pull in mix.pull():
        mix.arrived(TasksArrived(pull.env, 0, tasks(2000)))
    taken = []
    for _ in range(1000):
        env, _task = mix.take() or ("", None)
        taken.append(env)
        if env == "b":
            mix.did_not_train("b")
    assert taken.count("a") >= 190, "four times its share is the most"


def test_a_synchronous_run_evaluates_one_version_while_nothing_trains() -> None:
    core = new_core(eval=EVAL, max_off_policy_steps=0, max_outstanding=8)
    play(core, Started())
    assert orders_in(play(core, TasksArrived("env", 0, tasks(100)))) == [], "training waits"
    evaluated = orders_in(play(core, TasksArrived("env", 0, tasks(3), split="eval")))
    assert [order.split for order in evaluated] == ["eval"] * 6, "all of them at once"
    for number, order in enumerate(evaluated):
        commands = settle(core, order, scored(1.0, 0, number))
    assert {order.split for order in orders_in(commands)} == {"train"}
