"""Sockets that have received something are read a few at a time."""

import asyncio
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rollway.inference.http.ready import MAX_AT_ONCE, ready_sockets

pytestmark = pytest.mark.anyio

COUNT = 50


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(COUNT)]
        for ours, theirs in made:
            stack.enter_context(ours)
            stack.enter_context(theirs)
        yield made


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="only Linux has epoll")
async def test_other_tasks_run_between_the_reads_of_a_crowd(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    ready, reads, rounds = ready_sockets(), [0] * COUNT, [0]

    def read(index: int) -> None:
        pairs[index][0].recv(1)
        reads[index] += 1
        rounds[-1] += 1

    for index, (ours, theirs) in enumerate(pairs):
        ready.watch(ours.fileno(), lambda index=index: read(index))
        theirs.send(b"x")
    async with asyncio.timeout(30):
        while sum(reads) < COUNT:
            await asyncio.sleep(0)
            rounds.append(0)
    assert reads == [1] * COUNT
    assert max(rounds) <= 2 * MAX_AT_ONCE, "a round of the loop reads a few"
    for ours, theirs in pairs:
        ready.unwatch(ours.fileno())
        theirs.send(b"y")
    await asyncio.sleep(0.05)
    assert reads == [1] * COUNT, "what is not watched is not read"


async def test_all_clients_of_a_loop_share_its_sockets() -> None:
    assert ready_sockets() is ready_sockets()
