"""Who is silent, who listens, who is gone."""

from rollway.envserver.core.clients import LISTENING_S, MAX_AWAY, Clients
from rollway.envserver.core.leases import MAX_GAP_S, Leases


def test_a_lease_runs_out_unless_it_is_renewed() -> None:
    leases: Leases[str] = Leases()
    leases.tick(100.0)
    leases.renew("a")
    leases.renew("b")
    leases.tick(100.9)
    leases.renew("b")
    leases.tick(101.5)
    assert leases.silent(1.0) == ["a"]
    assert leases.heard_within(1.0) == ["b"]
    leases.end("a")
    assert leases.silent(1.0) == []


def test_one_that_was_deaf_itself_accuses_nobody() -> None:
    leases: Leases[str] = Leases()
    leases.renew("early")
    leases.tick(5_000.0)  # the clock's own beginning is no silence either
    leases.renew("a")
    leases.tick(5_060.0)
    assert leases.silence_s("a") == leases.silence_s("early") - MAX_GAP_S == MAX_GAP_S
    assert leases.silent(MAX_GAP_S * 2) == []


def ticked(clients: Clients, since_s: float, until_s: float) -> None:
    while since_s < until_s:
        since_s += 0.5
        clients.tick(since_s)


def test_news_is_for_those_who_were_heard_of_lately() -> None:
    clients = Clients(lease_s=30.0)
    clients.tick(0.0)
    clients.hello(b"quiet")
    ticked(clients, 0.0, LISTENING_S + 1)
    clients.hello(b"new")
    assert clients.listening() == [b"new"]
    assert clients.silent() == []
    assert clients.heard(b"quiet")
    assert clients.listening() == [b"new", b"quiet"]


def test_one_that_was_taken_for_gone_may_come_back_and_strangers_may_not() -> None:
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


def test_those_who_left_are_not_remembered_for_ever() -> None:
    clients = Clients(lease_s=2.0)
    names = [str(n).encode() for n in range(MAX_AWAY + 1)]
    for name in names:
        clients.hello(name)
        clients.away(name)
    assert not clients.heard(names[0])
    assert clients.heard(names[1])


def test_an_unreachable_one_hears_no_news_until_it_is_heard() -> None:
    clients = Clients(lease_s=30.0)
    clients.hello(b"a")
    assert clients.unreachable(b"a")
    assert not clients.unreachable(b"stranger")
    assert clients.listening() == []
    clients.heard(b"a")
    assert clients.listening() == [b"a"]
