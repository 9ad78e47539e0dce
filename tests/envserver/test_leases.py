"""When peers were last heard."""

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


def test_time_in_which_the_router_did_not_run_is_not_silence() -> None:
    leases: Leases[str] = Leases()
    leases.renew("early")
    leases.tick(5_000.0)  # the time before the first tick does not count either
    leases.renew("a")
    leases.tick(5_060.0)
    assert leases.silence_s("a") == leases.silence_s("early") - MAX_GAP_S == MAX_GAP_S
    assert leases.silent(MAX_GAP_S * 2) == []
