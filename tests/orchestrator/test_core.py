"""The core's rules, one by one."""

from typing import Any

import pytest
from tests.orchestrator.made import limits, scored

from rollway.orchestrator.core.commands import (
    CancelRollout,
    Credit,
    DiscardGroup,
    Dispatch,
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
    Started,
    TasksArrived,
    Tick,
    VersionPublished,
    WeightsApplied,
    WorkerLag,
)
from rollway.orchestrator.core.limits import DifficultyRule, EvalRule, RetryRule
from rollway.orchestrator.core.rollouts.tasks import TaskMix
from rollway.records.engine import EngineLoad
from rollway.records.ids import PolicyVersion, Step, WorkerName
from rollway.records.rollout import Cancelled, Failed, Outcome, Settled
from rollway.records.task import Task


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
    assert [type(one) for one in commands] == [ReleasePayload, UpdateWeights]
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
    (dropped,) = [one for one in commands if isinstance(one, DiscardGroup)]
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
    fates = [one.closed.fate for one in commands if isinstance(one, DiscardGroup)]
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
        assert mix.position("env") == (int(task[1].id) + 1) % 16
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


@pytest.mark.parametrize("answers_cancels", [False, True])
def test_others_train_on_without_an_environment_that_never_answers(answers_cancels: bool) -> None:
    """That its stale rollouts are cancelled makes it no less silent."""
    core = Core(
        limits(max_off_policy_steps=0, max_outstanding=8, patience_s=60, max_steps=1000),
        {"dead": 1.0, "good": 1.0}, Step(1), {},
    )  # fmt: skip
    orders: list[Dispatch] = []
    for pull in play(core, Started()):
        tasks = tuple(Task(id=str(n), prompt="?") for n in range(100))
        orders += [one for one in play(core, TasksArrived(pull.env, 0, tasks)) if is_order(one)]
    number = 0
    for second in range(1001, 1400, 10):
        commands = play(core, Tick(float(second)))
        for order in [one for one in orders if one.env == "good"]:
            number += 1
            commands += settle(core, order, scored(number % 2, core.applied_version, number))
        for ship in [one for one in commands if isinstance(one, Ship)]:
            version = PolicyVersion(ship.manifest.step)
            commands += play(core, VersionPublished(version, "p"))
            for cut in [one for one in commands if isinstance(one, CancelRollout) and answers_cancels]:
                gone = Settled(cut.rollout_id, 1, WorkerName("w"), Cancelled("stale"))
                commands += play(core, gone)
            commands += play(core, WeightsApplied(version))
        orders = [one for one in commands if is_order(one)]
    assert core.next_step > 5
    assert core.silent_envs == ("dead",)


def is_order(command: Any) -> bool:
    return isinstance(command, Dispatch)


def orders_of(commands: list[Any]) -> list[Dispatch]:
    return [one for one in commands if is_order(one)]


def test_a_rollout_that_failed_by_no_fault_of_its_own_runs_again() -> None:
    core, orders = started(retries=RetryRule({"engine": 2}, 0.5))
    (again,) = settle(core, orders[0], Failed("engine", "gone"))
    assert (again.rollout_id, again.group_id, again.task) == ("g0.0+1", 0, orders[0].task)
    (again,) = settle(core, again, Failed("engine", "gone"))
    assert again.rollout_id == "g0.0+2"
    assert not orders_of(settle(core, again, Failed("engine", "gone"))), "twice is enough"
    assert not orders_of(settle(core, orders[1], Failed("env", "x"))), "the environment's own fault"
    assert core.num_retries == 2
    for n, order in enumerate(orders[2:4]):
        settle(core, order, scored(n, 0, n))
    assert core.num_ready == 2, "the group is complete without"


def test_retries_end_with_their_budget() -> None:
    core, orders = started(
        retries=RetryRule({"engine": 100}, 0.1), max_in_flight=400, max_outstanding=400, batch_size=400
    )
    assert len(orders) == 400
    again = [order for one in orders for order in orders_of(settle(core, one, Failed("engine", "x")))]
    num_first = len(orders) + sum("+" not in one.rollout_id for one in again)
    assert 40 <= core.num_retries <= num_first / 10 + 1


def test_groups_that_run_as_one_are_not_run_again_in_part() -> None:
    core = Core(limits(retries=RetryRule({"engine": 2}, 0.5)), {"env": 1.0}, Step(1), {})
    play(core, Started(whole_groups=frozenset({"env"})))
    tasks = tuple(Task(id=str(n), prompt="?") for n in range(100))
    orders = orders_of(play(core, TasksArrived("env", 0, tasks)))
    assert not settle(core, orders[0], Failed("engine", "gone"))


def test_stragglers_are_cut_once_most_of_their_group_has_settled() -> None:
    core, orders = started(cut_after=0.75, cut_wait_s=30)
    play(core, Tick(1000.0))
    for n, order in enumerate(orders[:2]):
        settle(core, order, scored(n, 0, n))
    assert not play(core, Tick(1100.0)), "half of them is not enough"
    settle(core, orders[2], scored(0, 0, 2))
    assert not play(core, Tick(1129.0))
    (cut,) = play(core, Tick(1130.0))
    assert isinstance(cut, CancelRollout)
    assert cut.rollout_id == orders[3].rollout_id
    assert not play(core, Tick(1200.0)), "once is enough"


def test_batches_by_tokens_are_full_when_they_have_as_many() -> None:
    core, orders = started(batch_tokens=100, batch_size=8, max_outstanding=64, max_in_flight=64)
    ships: list[Ship] = []
    for n, order in enumerate(orders):
        ships += [one for one in settle(core, order, scored(n % 2, 0, n)) if isinstance(one, Ship)]
        if ships:
            break
    assert len(ships[0].manifest.rows) == 12, "groups of 4, with 10 tokens each rollout"
    assert core.rollouts_a_batch == 10


def test_no_more_start_than_a_minute_allows() -> None:
    core, orders = started(rollouts_a_minute=8, max_in_flight=64, max_outstanding=64)
    assert len(orders) == 4, "one group, and its share of a minute has to pass"
    assert not orders_of(play(core, Tick(1000.0)))
    assert not orders_of(play(core, Tick(1029.0)))
    assert len(orders_of(play(core, Tick(1030.0)))) == 4
    assert len(orders_of(play(core, Tick(2000.0)))) == 4, "what was not used is gone"


def test_fewer_run_while_the_engine_is_overloaded() -> None:
    core, orders = started(adapts=True, max_in_flight=40, max_outstanding=80, batch_size=80)
    assert len(orders) == 40
    play(core, EngineLoad(running=10, waiting=30, cache_use=0.5))
    assert core.max_in_flight == 36
    play(core, EngineLoad(running=30, waiting=0, cache_use=0.99))
    assert core.max_in_flight == 32
    play(core, EngineLoad(running=30, waiting=3, cache_use=0.5))
    assert core.max_in_flight == 32, "neither too much nor too little"
    play(core, WorkerLag(0.3))
    play(core, EngineLoad(running=30, waiting=0, cache_use=0.5))
    assert core.max_in_flight == 28, "workers are late"
    play(core, EngineLoad(running=30, waiting=0, cache_use=0.5))
    assert core.max_in_flight == 32


def test_a_solved_task_leaves_the_normal_pool_and_comes_back_when_it_fails() -> None:
    rule = DifficultyRule(easy_at=1.0, hard_at=0.0, easy_share=0.2, hard_share=0.0)
    core = Core(
        limits(difficulty=rule, max_in_flight=4, max_outstanding=10**5, batch_size=10**5, group_size=4,
               max_fruitless_groups=10**6), {"env": 1.0}, Step(1), {},
    )  # fmt: skip
    tasks = tuple(Task(id=str(n), prompt="?") for n in range(3))
    play(core, Started())
    commands = play(core, TasksArrived("env", 0, tasks, exhausted=True))
    solved = {"0"}
    seen: list[str] = []
    moves: list[tuple[str, str | None]] = []
    for number in range(400):
        if number == 200:
            solved = set()
        pulls = [one for one in commands if isinstance(one, PullTasks)]
        pending, commands = orders_of(commands), []
        for pull in pulls:
            commands += play(core, TasksArrived("env", pull.start, tasks[pull.start :], exhausted=True))
        pending += orders_of(commands)
        seen.append(pending[0].task.id)
        wins = pending[0].task.id in solved
        for member, order in enumerate(pending):
            reward = 1.0 if wins else member % 2
            commands += settle(core, order, scored(reward, 0, 4 * number + member))
        moves += [(one.task.id, one.pool) for one in commands if isinstance(one, PoolTask)]
    assert moves == [("0", "easy"), ("0", None)]
    assert 0.15 < seen[10:200].count("0") / 190 < 0.25, "its share, no more"
    assert seen[220:].count("0") / 180 > 0.3, "one of three again"


def eval_rule(**changes: Any) -> EvalRule:
    wants: dict[str, Any] = {
        "every": 2, "num_tasks": 3, "num_rollouts": 2, "share": 0.25, "at_start": True, "envs": ("env",)
    }  # fmt: skip
    return EvalRule(**{**wants, **changes})


def test_evaluations_run_beside_training_within_their_share() -> None:
    core = Core(limits(evals=eval_rule()), {"env": 1.0}, Step(1), {})
    pulls = [one for one in play(core, Started()) if isinstance(one, PullTasks)]
    assert [(one.split, one.count) for one in pulls] == [("eval", 3), ("train", 8)]
    tasks = tuple(Task(id=f"t{n}", prompt="?") for n in range(3))
    first = orders_of(play(core, TasksArrived("env", 0, tasks, split="eval")))
    assert [one.split for one in first] == ["eval"] * 4, "two tasks: a quarter of 16"
    plenty = tuple(Task(id=str(n), prompt="?") for n in range(8))
    train = orders_of(play(core, TasksArrived("env", 0, plenty)))
    assert {one.split for one in train} == {"train"}
    assert core.num_in_flight == 16
    commands: list[Any] = []
    for n, order in enumerate(first):
        commands += settle(core, order, scored(1.0, 0, n))
    last = [one for one in orders_of(commands) if one.split == "eval"]
    assert not [one for one in commands if isinstance(one, ReportEval)]
    for n, order in enumerate(last):
        commands += settle(core, order, scored(0.0, 0, 10 + n))
    (report,) = [one for one in commands if isinstance(one, ReportEval)]
    assert report.version == 0
    assert [len(one.group.members) for one in report.closed] == [2, 2, 2]
    assert core.num_ready == 0, "nothing of it trains"
    assert core.live_bytes == 0, "nothing of it is kept"


def test_the_last_version_is_evaluated_before_the_run_ends() -> None:
    core, orders = started(max_steps=1, max_outstanding=8, evals=eval_rule(at_start=False))
    commands: list[Any] = []
    for n, order in enumerate(orders):
        commands += settle(core, order, scored(n % 2, 0, n))
    commands = play(core, VersionPublished(PolicyVersion(1), "p"))
    assert any(isinstance(one, UpdateWeights) for one in commands)
    assert not core.finished
    (pull,) = play(core, WeightsApplied(PolicyVersion(1)))
    assert pull == PullTasks("env", 0, 3, "eval")
    evals = orders_of(play(core, TasksArrived("env", 0, (Task(id="t", prompt="?"),), True, "eval")))
    for n, order in enumerate(evals):
        commands = settle(core, order, scored(1.0, 1, 100 + n))
    assert [type(one) for one in commands][-2:] == [ReportEval, Finish]


def test_a_run_in_which_nothing_moves_stops_and_says_what_it_waited_for() -> None:
    core, _orders = started(quiet_s=100)
    play(core, Tick(1000.0))
    assert not play(core, Tick(1099.0))
    (given_up,) = play(core, Tick(1100.0))
    assert isinstance(given_up, GiveUp)
    assert "nothing has moved for 100 s" in given_up.reason
    assert "step 1 waits for rollouts" in given_up.reason


def test_shares_follow_what_trains_not_what_was_tried() -> None:
    """Half of b's groups teach nothing: it gets twice as many."""
    mix = TaskMix({"a": 3.0, "b": 1.0}, {}, ahead=2000)
    for pull in mix.pull():
        mix.arrived(pull.env, 0, tuple(Task(id=str(n), prompt="?") for n in range(2000)), False)
    trained = {"a": 0, "b": 0}
    for number in range(1000):
        taken = mix.take()
        assert taken is not None
        if taken[0] == "b" and number % 2:
            mix.useless("b")
        else:
            trained[taken[0]] += 1
    assert abs(trained["a"] / trained["b"] - 3) < 0.1


def test_an_environment_of_no_use_does_not_take_everything() -> None:
    mix = TaskMix({"a": 1.0, "b": 1.0}, {}, ahead=2000)
    for pull in mix.pull():
        mix.arrived(pull.env, 0, tuple(Task(id=str(n), prompt="?") for n in range(2000)), False)
    taken = []
    for _ in range(1000):
        env, _task = mix.take() or ("", None)
        taken.append(env)
        if env == "b":
            mix.useless("b")
    assert taken.count("a") >= 190, "four times its share is the most"
