"""Clients: which are welcome, which hear news, which are gone, and that they do not see each other."""

from typing import Any

import pytest
from tests.doubles.router_core import (
    CLIENT,
    OTHER,
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

from rollway.envserver.core.clients import LISTENING_S, MAX_AWAY, Clients
from rollway.envserver.core.events import (
    ClientUnreachable,
    SendToClient,
    SendToWorker,
    WorkerDied,
    WorkerMessage,
)
from rollway.records.ids import RolloutId
from rollway.records.rollout import Cancelled, Failed
from rollway.wire.messages import (
    Cancel,
    Hello,
    NextTasks,
    Ping,
    Refused,
    RolloutPhases,
    RolloutProgress,
    ServerStats,
    Unknown,
    Welcome,
    WorkerLost,
)


def ticked(clients: Clients, since_s: float, until_s: float) -> None:
    while since_s < until_s:
        since_s += 0.5
        clients.tick(since_s)


def test_only_clients_that_were_heard_lately_get_news() -> None:
    clients = Clients(lease_s=30.0)
    clients.tick(0.0)
    clients.hello(b"quiet")
    ticked(clients, 0.0, LISTENING_S + 1)
    clients.hello(b"new")
    assert clients.listening() == [b"new"]
    assert clients.silent() == []
    assert clients.heard(b"quiet")
    assert clients.listening() == [b"new", b"quiet"]


def test_a_client_whose_lease_ran_out_may_return_and_a_stranger_may_not() -> None:
    clients = Clients(lease_s=2.0)
    clients.tick(0.0)
    clients.hello(b"slow")
    ticked(clients, 0.0, 3.0)
    assert clients.silent() == [b"slow"]
    clients.away(b"slow")
    assert clients.silent() == clients.listening() == []
    assert clients.heard(b"slow")
    assert clients.listening() == [b"slow"]
    assert not clients.heard(b"stranger")


def test_only_the_last_clients_that_left_are_remembered() -> None:
    clients = Clients(lease_s=2.0)
    names = [str(n).encode() for n in range(MAX_AWAY + 1)]
    for name in names:
        clients.hello(name)
        clients.away(name)
    assert not clients.heard(names[0])
    assert clients.heard(names[1])


def test_an_unreachable_client_gets_no_news_until_it_is_heard_again() -> None:
    clients = Clients(lease_s=30.0)
    clients.hello(b"a")
    assert clients.unreachable(b"a")
    assert not clients.unreachable(b"stranger")
    assert clients.listening() == []
    clients.heard(b"a")
    assert clients.listening() == [b"a"]


def test_a_client_is_welcomed_once_the_first_worker_is_up() -> None:
    router = CoreRouter()
    assert router.last == []
    welcomed = router.on(WorkerMessage(A, Hello("a", 2, whole_groups=True)))
    assert SendToClient(CLIENT, Welcome("env", 1, whole_groups=True)) in welcomed
    assert router.send(Hello("d"), OTHER) == [
        SendToClient(OTHER, Welcome("env", 1, whole_groups=True))
    ]
    assert (
        sent(router.on(WorkerMessage(B, Hello("b", 2, whole_groups=True))), Welcome) == []
    ), "once each"


def test_another_protocol_is_refused() -> None:
    (refused,) = sent(CoreRouter().send(Hello("c", protocol=99), OTHER), Refused)
    assert "99" in refused.reason


@pytest.mark.parametrize("message", [a_run("r"), a_group("r"), NextTasks(0, 1)])
def test_strangers_get_no_answer(message: Any) -> None:
    router = CoreRouter("a")
    assert router.send(message, b"stranger") == []
    assert (router.core.num_open, router.core.num_dropped) == (0, 1)


def test_a_stranger_that_pings_is_told_to_say_hello() -> None:
    """It was greeted by a server that was here before."""
    router = CoreRouter("a")
    assert router.send(Ping(), b"stranger") == [SendToClient(b"stranger", Unknown())]


def test_two_clients_may_use_the_same_ids() -> None:
    router = CoreRouter("a", credits=8)
    router.send(Hello("d"), OTHER)
    (first,) = runs_sent(router.send(a_run("r")))[A]
    (second,) = runs_sent(router.send(a_run("r"), OTHER))[A]
    assert first.rollout_id != second.rollout_id
    assert router.send(Cancel(RolloutId("r"), "x"), OTHER) == [
        SendToWorker(A, Cancel(second.rollout_id, "x"))
    ]
    assert [end.rollout_id for end in ends_sent(router.settle(second, A), OTHER)] == ["r"]
    commands = router.settle(first, A)
    assert [end.rollout_id for end in ends_sent(commands)] == ["r"]
    assert ends_sent(commands, OTHER) == []


def test_progress_goes_to_the_rollouts_client_and_news_to_all_clients() -> None:
    router = CoreRouter("a", credits=8)
    router.send(Hello("d"), OTHER)
    (first,) = runs_sent(router.send(a_run("r")))[A]
    (second,) = runs_sent(router.send(a_run("s"), OTHER))[A]
    unknown = RolloutProgress(RolloutId("x#9"), "env", 1.0, 0, 0)
    both = [RolloutProgress(run.rollout_id, "engine", 1.0, 2, 3) for run in (first, second)]
    heard = router.on(WorkerMessage(A, RolloutPhases(A, (*both, unknown))))
    assert {command.client: command.message.rollouts[0].rollout_id for command in heard} == {  # type: ignore[union-attr]
        CLIENT: "r",
        OTHER: "s",
    }
    assert [len(progress.rollouts) for progress in sent(heard, RolloutPhases)] == [1, 1]
    assert len(sent(router.on(WorkerMessage(A, stats("a"))), ServerStats)) == 2
    assert len(sent(router.on(WorkerDied(A)), WorkerLost)) == 2


def test_a_silent_client_gets_no_news() -> None:
    router = CoreRouter("a")
    router.wait(10.0, A)
    assert sent(router.on(WorkerMessage(A, stats("a"))), ServerStats) == []
    router.send(Ping())
    assert len(sent(router.on(WorkerMessage(A, stats("a"))), ServerStats)) == 1


def test_a_client_may_not_fill_the_queue() -> None:
    router = CoreRouter("a", credits=1, max_waiting=2)
    for id in ("runs", "waits1", "waits2"):
        assert ends_sent(router.send(a_run(id))) == []
    (failed,) = ends_sent(router.send(a_run("too many")))
    assert isinstance(failed.outcome, Failed)
    assert failed.outcome.boundary == "worker"
    assert "2 rollouts waiting already" in failed.outcome.error
    router.send(Hello("d"), OTHER)
    assert ends_sent(router.send(a_run("r"), OTHER), OTHER) == [], (
        "another client has its own room"
    )
    assert len(ends_sent(router.send(a_group("a", "b", "c")))) == 3


def test_a_silent_clients_rollouts_are_cancelled_in_workers_and_in_the_queue() -> None:
    router = CoreRouter("a", credits=1, client_lease_s=10.0)
    (running,) = runs_sent(router.send(a_run("running")))[A]
    router.send(a_run("waiting"))
    commands = router.wait(12.0, A)
    assert [end.rollout_id for end in ends_sent(commands)] == ["running", "waiting"]
    assert all(isinstance(end.outcome, Cancelled) for end in ends_sent(commands))
    assert [cancel.rollout_id for cancel in sent(commands, Cancel)] == [running.rollout_id]
    assert router.core.num_open == 0
    assert router.settle(running, A) == [], (
        "no client hears of it, and its credit is free again"
    )
    assert router.core.num_late == 0
    assert runs_sent(router.send(a_run("again"))).keys() == {A}, (
        "the client was still there, and needs no new Hello"
    )


def test_a_client_that_pings_keeps_its_lease() -> None:
    router = CoreRouter("a", client_lease_s=10.0)
    router.send(a_run("r"))
    assert ends_sent(router.wait(60.0, A, pings=(CLIENT,))) == []


def test_answers_wait_for_a_client_that_lost_its_connection() -> None:
    router = CoreRouter("a", credits=4, client_lease_s=10.0)
    given = [runs_sent(router.send(a_run(id)))[A][0] for id in ("r", "s")]
    (answer,) = router.settle(given[0], A)
    assert isinstance(answer, SendToClient)
    assert router.on(ClientUnreachable(answer)) == []
    assert sent(router.on(WorkerMessage(A, stats("a"))), ServerStats) == []
    assert router.send(Ping()) == [answer]
    assert router.send(Ping()) == []
    (answer,) = router.settle(given[1], A)
    assert isinstance(answer, SendToClient)
    router.on(ClientUnreachable(answer))
    router.wait(12.0, A)
    assert router.send(Ping()) == [], "it is not kept forever"
