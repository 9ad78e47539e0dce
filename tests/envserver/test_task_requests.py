"""Requests for tasks go to one worker and are answered once."""

from tests.doubles.router_core import (
    CLIENT,
    OTHER,
    TASK,
    A,
    B,
    CoreRouter,
    sent,
)

from rollway.envserver.core.events import (
    SendToClient,
    SendToWorker,
    WorkerDied,
    WorkerMessage,
)
from rollway.envserver.core.task_requests import MAX_OPEN
from rollway.wire.messages import (
    Hello,
    NextTasks,
    Tasks,
)


def test_a_request_goes_to_one_worker_and_to_another_when_that_dies() -> None:
    router = CoreRouter("a", "b")
    request = NextTasks(0, 4)
    assert router.send(request) == [SendToWorker(A, request)]
    assert SendToWorker(B, request) in router.on(WorkerDied(A))
    tasks = Tasks(0, (TASK,))
    assert router.on(WorkerMessage(A, tasks)) == [], "a dead worker's answer does not count"
    assert router.on(WorkerMessage(B, tasks)) == [SendToClient(CLIENT, tasks)]
    assert router.on(WorkerMessage(B, tasks)) == []


def test_splits_and_clients_get_their_own_tasks() -> None:
    router = CoreRouter("a")
    router.send(Hello("d"), OTHER)
    router.send(NextTasks(0, 4))
    router.send(NextTasks(0, 4, split="eval"))
    router.send(NextTasks(0, 2), OTHER)
    few, many = Tasks(0, (TASK,)), Tasks(0, (TASK, TASK))
    held_out = Tasks(0, (TASK,), split="eval")
    assert router.on(WorkerMessage(A, held_out)) == [SendToClient(CLIENT, held_out)]
    assert router.on(WorkerMessage(A, many)) == [SendToClient(CLIENT, many)], (
        "answers come in order"
    )
    assert router.on(WorkerMessage(A, few)) == [SendToClient(OTHER, few)]


def test_a_client_may_have_a_limited_number_of_open_requests() -> None:
    router = CoreRouter("a")
    router.send(Hello("d"), OTHER)
    for start in range(MAX_OPEN):
        assert sent(router.send(NextTasks(start, 1)), NextTasks)
    assert sent(router.send(NextTasks(0, 1)), NextTasks), "an open request may be repeated"
    (refused,) = sent(router.send(NextTasks(MAX_OPEN, 1, split="eval")), Tasks)
    assert (refused.start, refused.split) == (MAX_OPEN, "eval")
    assert "the most a client may have" in refused.error
    assert sent(router.send(NextTasks(0, 1), OTHER), NextTasks), (
        "another client has its own limit"
    )
    router.on(WorkerMessage(A, Tasks(0, (TASK,))))
    assert sent(router.send(NextTasks(MAX_OPEN, 1)), NextTasks)
