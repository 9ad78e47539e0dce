"""Workers that are stopped, blocked or killed: the rollout to blame fails, and the others do not."""

import asyncio
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.doubles.env_server import UNRULY, Server, serving, unruly
from tests.doubles.unruly import RAISED, WRITES

from rollway.config.specs import ServerLimits
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Failed, Outcome, Scored, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import NextTasks, RolloutPhases, Run, RunGroup, Tasks

pytestmark = [pytest.mark.anyio, pytest.mark.system]


async def outcomes(server: Server, count: int) -> list[Outcome]:
    """Run tasks 0 to `count`, each once. Every end comes once."""
    for n in range(count):
        await server.run(f"r{n}", str(n))
    ends = [await server.outcome(f"r{n}") for n in range(count)]
    assert all(len(ends) == 1 for ends in server.settled.values())
    return ends


def the_bad_one(ends: list[Outcome]) -> Failed:
    """Return the failure of task 1. All others must be scored."""
    bad = ends.pop(1)
    assert all(isinstance(end, Scored) for end in ends), ends
    assert isinstance(bad, Failed), bad
    return bad


async def test_a_stopped_workers_rollouts_move_and_none_is_blamed(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with unruly(tmp_path, tiny_moe, "Patient", workers=2, lease_s=4.0) as server:
        server.hold_replies(16)
        for n in range(16):
            await server.run(f"r{n}", "0")
        await server.engine.until_running(16)
        victim = server.workers()[0]
        os.kill(victim.pid, signal.SIGSTOP)
        while len(server.settled) < 8:
            await server.receive(Settled)
        ends = [settled for ends in server.settled.values() for settled in ends]
        assert len(ends) == 8, "each once"
        assert all(isinstance(end.outcome, Scored) and end.attempt == 2 for end in ends), ends
        assert [(lost.num_moved, lost.num_failed) for lost in server.lost] == [(8, 0)]
        psutil.wait_procs([victim], timeout=60)
        assert not victim.is_running(), "SIGKILL reaches a stopped process"


async def test_a_router_that_was_stopped_itself_blames_no_worker(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with unruly(tmp_path, tiny_moe, "Patient", lease_s=2.0) as server:
        replies = server.hold_replies()
        for n in range(8):
            await server.run(f"r{n}", "0")
        await server.engine.until_running(8)
        os.kill(server.pid, signal.SIGSTOP)
        replies.set()
        await server.engine.until_running(0)
        await asyncio.sleep(4.0)  # twice the lease
        os.kill(server.pid, signal.SIGCONT)
        ends = [await server.outcome(f"r{n}") for n in range(8)]
        assert all(isinstance(end, Scored) for end in ends), ends
        assert not server.lost


@pytest.mark.parametrize("kind", ["HoldsLoop", "HoldsInChild"])
async def test_a_rollout_that_holds_the_loop_fails_alone(
    kind: str, tmp_path: Path, tiny_moe: Path
) -> None:
    async with unruly(tmp_path, tiny_moe, kind, lease_s=3.0) as server:
        bad = the_bad_one(await outcomes(server, 6))
        assert bad.boundary == "env"
        assert "unruly.w0.0" in bad.error
        assert re.search(rf"for \d s, .*, at {UNRULY}:\d+ in hold_on", bad.text), bad.text
        assert [lost.num_failed for lost in server.lost] == [1]
    assert "held the event loop" in (tmp_path / "router.log").read_text()


async def test_a_rollout_that_ends_its_worker_is_blamed_and_the_others_succeed(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with unruly(tmp_path, tiny_moe, "Exits") as server:
        bad = the_bad_one(await outcomes(server, 6))
        assert bad.boundary == "worker"
        assert "its code was running when its worker died, 2 times" in bad.error
        assert "exited with 9" in bad.error
        assert server.settled["r1"][0].attempt == 2


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("Quits", "SystemExit: enough"),
        ("QuitsInTask", "SystemExit: enough"),
        ("Panics", "Panic: of a library"),
        ("Surrogate", r"ValueError: caf\udce9"),
        ("SpeaksSurrogate", "the text is not Unicode"),
        ("LeavesSurrogate", "a message holds text that is not Unicode"),
        ("HugeNumber", "OverflowError: int too large"),
        ("StopsLoop", ""),
        ("ClosesFiles", ""),
        ("WritesToAllFiles", ""),
        ("OpensNoMoreFiles", "no other rollout was running when its worker died"),
    ],
)
async def test_whatever_a_rollout_does_to_its_worker_it_fails_alone(
    kind: str, error: str, tmp_path: Path, tiny_moe: Path
) -> None:
    async with unruly(tmp_path, tiny_moe, kind) as server:
        bad = the_bad_one(await outcomes(server, 6))
        assert error in bad.error


async def test_rewards_that_raise_no_exception_or_write_to_all_files_fail_alone(
    tmp_path: Path, tiny_moe: Path
) -> None:
    size = {"concurrency": 32, "scoring_processes": 1}
    async with unruly(tmp_path, tiny_moe, "RaisingScorers", **size) as server:
        raising = [*RAISED, *(f"{number}g" for number in RAISED)]
        await run_groups(server, "first")
        first = await server.outcome("first.0")
        await run_groups(server, *raising, WRITES, *(f"good{n}" for n in range(4)))
        for task in (*raising, WRITES):
            for n in range(2):
                end = await server.outcome(f"{task}.{n}")
                assert isinstance(end, Failed), (task, end)
                assert end.boundary == "scorer", end
                if task != WRITES:
                    assert type(RAISED[task.removesuffix("g")]).__name__ in end.error
        await run_groups(server, "last")
        good = [await server.outcome(f"good{n}.0") for n in range(4)]
        last = await server.outcome("last.0")
        assert all(isinstance(end, Scored) for end in (first, *good, last)), good
        assert isinstance(first, Scored)
        assert isinstance(last, Scored)
        assert first.metrics["measured"] != last.metrics["measured"], "a new process"
        assert all(
            settled.attempt == 1 for ends in server.settled.values() for settled in ends
        )
        await server.client.send(NextTasks(0, 1))
        assert r"caf\udce9" in (await server.receive(Tasks)).error
        assert not server.lost, "the worker lives"


async def run_groups(server: Server, *tasks: str) -> None:
    """Run two rollouts of each task, as a group."""
    for task in tasks:
        runs = [
            Run(
                RolloutId(f"{task}.{n}"),
                1,
                Task(task, "1?"),
                Sampling(20),
                PolicyVersion(0),
                0,
            )
            for n in range(2)
        ]
        await server.client.send(RunGroup.of(runs))


async def test_errors_name_the_rewards_that_spin_hoard_or_exit(
    tmp_path: Path, tiny_moe: Path
) -> None:
    limits = ServerLimits(scoring_memory_mb=256)
    async with unruly(
        tmp_path, tiny_moe, "Scorers", limits=limits, scoring_deadline_s=10.0
    ) as server:
        ends = await outcomes(server, 8)
        expected = {
            1: f"longer than 10 s and was killed, at {UNRULY}:.* in spin",
            2: f"MemoryError: .* 256 MB more than at its start, at {UNRULY}:.* in hoard",
            3: "exit code 7",
        }
        for number, end in enumerate(ends):
            if number in expected:
                assert isinstance(end, Failed), end
                assert end.boundary == "scorer"
                assert re.search(expected[number], end.text), end.text
            else:
                assert isinstance(end, Scored), end
        assert not server.lost
    log = (tmp_path / "unruly.w0.log").read_text()
    assert "boundary scorer (number 1), environment" in log
    assert "in hoard" in log


async def test_progress_says_where_rollouts_are(tmp_path: Path, tiny_moe: Path) -> None:
    async with unruly(tmp_path, tiny_moe, "Patient", latency_s=2.5) as server:
        await server.run("quick", "0")
        await server.run("slow", "30")
        seen: dict[str, list[Any]] = {"quick": [], "slow": []}
        while not seen["slow"] or seen["slow"][-1].phase != "env":
            for progress in (await server.receive(RolloutPhases)).rollouts:
                seen[progress.rollout_id].append(progress)
        assert seen["quick"][0].phase == seen["slow"][0].phase == "engine"
        assert (seen["slow"][-1].num_turns, seen["slow"][-1].num_tokens > 0) == (1, True)
        assert seen["slow"][0].num_turns == 0


async def test_a_worker_that_is_replaced_runs_the_code_of_the_start(
    tmp_path: Path, tiny_moe: Path
) -> None:
    file = tmp_path / "edited.py"
    shutil.copyfile(UNRULY, file)
    async with serving(tmp_path, tiny_moe, "Exits", file=str(file)) as server:
        await server.until_up(1)
        file.write_text("raise RuntimeError('half of an edit')")
        bad = the_bad_one(await outcomes(server, 6))
        assert "exited with 9" in bad.error
        assert "was edited: all workers keep the code of the start" in server.lost[0].text
