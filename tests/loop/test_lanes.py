"""The process lane: results, errors, deadlines and deaths, with real processes."""

import asyncio
import ctypes
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollway.config.specs import WatchSpec
from rollway.errors import (
    LaneClosed,
    LaneCrashed,
    LaneError,
    LaneFull,
    LaneRaised,
    LaneTimeout,
)
from rollway.loop.lanes.lanes import ProcessLane
from rollway.loop.lanes.server import find_caller
from rollway.loop.lanes.threads import thread
from rollway.loop.watch.lag import LagMonitor
from rollway.loop.watch.run import LoopWatch
from rollway.loop.watch.stalls import StallWatch
from rollway.records.lag import Stall

pytestmark = pytest.mark.anyio


def pid() -> int:
    return os.getpid()


def fail(message: str) -> None:
    raise ValueError(message)


def spin() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(3600)


def segfault() -> None:
    ctypes.string_at(0)


def die(code: int) -> None:
    os._exit(code)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)
    spin()


def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def unpicklable() -> Any:
    return lambda: None


def private_class() -> Any:
    """An object whose class the parent cannot import."""
    module = types.ModuleType("only_here")
    exec("class Score: pass", module.__dict__)
    sys.modules["only_here"] = module
    return module.Score()


def ask(question: Any) -> Any:
    return find_caller()(question)


def ask_with_private_class() -> Any:
    return ask(private_class())


def spawn_and_spin(path: str) -> None:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(path).write_text(str(started.pid))
    spin()


def fork_and_die(path: str) -> None:
    """Fork a process, which keeps every file descriptor of its parent, and exit."""
    child = os.fork()
    if child:
        Path(path).write_text(str(child))
        os._exit(5)
    time.sleep(3600)


def warm_up(path: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")


def cannot_warm_up(path: str) -> None:
    if not Path(path).exists():
        raise RuntimeError("no dataset")


def line_of(function: Any, text: str) -> str:
    """Return the file:line of the first line of a function that contains `text`."""
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n in range(first, len(lines)) if text in lines[n - 1])
    return f"{__file__}:{number}"


def ends_soon(number: int) -> bool:
    """Return whether a process that is not our child ends within ten seconds."""
    try:
        psutil.Process(number).wait(10)
    except psutil.TimeoutExpired:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        pass
    return True


@asynccontextmanager
async def watched(stall_ms: float) -> AsyncIterator[LoopWatch]:
    config = WatchSpec(stall_ms=stall_ms)
    with StallWatch(0.01, 10) as stalls, LagMonitor(0.01, on_tick=stalls.beat) as lag:
        yield LoopWatch("test", config, lag, stalls)


async def test_calls_run_elsewhere_in_a_warm_process() -> None:
    async with ProcessLane("test", size=1) as lane:
        first = await lane.call(pid, deadline_s=30)
        assert first != os.getpid()
        assert await lane.call(pid, deadline_s=30) == first
        big = list(range(200_000))
        assert await lane.call(double, big, deadline_s=30) == double(big)
    assert not psutil.pid_exists(first)


async def test_warm_processes_start_before_the_first_call_and_are_warmed_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "warmed"
    async with ProcessLane("test", size=2, warm=(warm_up, str(path))) as lane:
        await asyncio.gather(*(slot.begin() for slot in lane._slots))
        warmed = {int(line) for line in path.read_text().split()}
        pids = await asyncio.gather(*(lane.call(nap, 0.2, deadline_s=30) for _ in range(4)))
        assert set(pids) == warmed


async def test_a_failed_warm_up_reaches_the_caller_and_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "dataset"
    async with ProcessLane("test", size=1, warm=(cannot_warm_up, str(path))) as lane:
        for _ in range(2):
            with pytest.raises(LaneRaised, match="RuntimeError: no dataset"):
                await lane.call(pid, deadline_s=30)
        path.touch()
        assert await lane.call(double, [1], deadline_s=30) == [2]


async def test_an_exception_carries_its_class_and_traceback_and_the_process_lives() -> None:
    async with ProcessLane("test", size=1) as lane:
        before = await lane.call(pid, deadline_s=30)
        with pytest.raises(LaneRaised, match="ValueError: no good") as raised:
            await lane.call(fail, "no good", deadline_s=30)
        assert (raised.value.kind, raised.value.text) == ("ValueError", "no good")
        assert "in fail" in raised.value.traceback
        assert raised.value.where == f"{line_of(fail, 'raise')} in fail"
        with pytest.raises(LaneRaised, match="lambda"):
            await lane.call(unpicklable, deadline_s=30)
        with pytest.raises(
            LaneRaised, match="private_class sent a value that this process cannot"
        ):
            await lane.call(private_class, deadline_s=30)
        assert await lane.call(pid, deadline_s=30) == before


async def test_a_question_that_gets_no_reply_costs_its_process_and_no_other_call() -> None:
    async def reply(question: Any) -> Any:
        return f"{question}!"

    async with ProcessLane("test", size=1) as lane:
        assert await lane.call(ask, "ready", deadline_s=30, replier=reply) == "ready!"
        pids = {await lane.call(pid, deadline_s=30)}
        with pytest.raises(LaneRaised, match="sent a value that this process cannot read"):
            await lane.call(ask_with_private_class, deadline_s=30, replier=reply)
        pids.add(await lane.call(pid, deadline_s=30))
        with pytest.raises(LaneRaised, match="asked its caller, which does not answer"):
            await lane.call(ask, "ready", deadline_s=30)
        pids.add(await lane.call(pid, deadline_s=30))
    assert len(pids) == 3


@pytest.mark.parametrize("stuck", [spin, hold_the_gil])
async def test_a_deadline_kills_the_call_names_its_line_and_the_next_call_works(
    stuck: Any,
) -> None:
    async with ProcessLane("test", size=1) as lane:
        before = await lane.call(pid, deadline_s=30)
        with pytest.raises(LaneTimeout) as raised:
            await lane.call(stuck, deadline_s=0.2)
        name = stuck.__name__
        message = str(raised.value)
        assert f"{name} ran longer than 0.2 s and was killed, at {__file__}:" in message
        assert message.endswith(f" in {name}")
        assert not psutil.pid_exists(before)
        assert await lane.call(double, [1], deadline_s=30) == [2]


async def test_a_deadline_also_kills_processes_the_call_started(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    async with ProcessLane("test", size=1) as lane:
        with pytest.raises(LaneTimeout):
            await lane.call(spawn_and_spin, str(path), deadline_s=10)
        assert ends_soon(int(path.read_text()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((die, 7), "die ended its process with exit code 7"),
        ((kill_self, signal.SIGKILL), "kill_self ended its process by SIGKILL"),
        ((segfault,), "segfault ended its process by SIGSEGV, at "),
    ],
    ids=["exit", "kill", "segfault"],
)
async def test_a_crash_is_described_and_hurts_no_other_call(
    call: tuple[Any, ...], message: str
) -> None:
    async with ProcessLane("test", size=2) as lane:
        crash = asyncio.create_task(lane.call(*call, deadline_s=30))
        others = [lane.call(double, [n], deadline_s=30) for n in range(5)]
        assert await asyncio.gather(*others) == [[2 * n] for n in range(5)]
        with pytest.raises(LaneCrashed, match=re.escape(message)) as raised:
            await crash
        if call[0] is segfault:
            assert line_of(segfault, "string_at") in str(raised.value)
        assert await asyncio.gather(
            *(lane.call(double, [n], deadline_s=30) for n in range(4))
        )


async def test_a_crash_is_noticed_though_a_forked_child_holds_the_pipe(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pid"
    async with ProcessLane("test", size=1) as lane:
        with pytest.raises(LaneCrashed, match="exit code 5"):
            await lane.call(fork_and_die, str(path), deadline_s=60)
        assert ends_soon(int(path.read_text()))


async def test_a_process_killed_while_idle_costs_no_call() -> None:
    async with ProcessLane("test", size=1) as lane:
        before = await lane.call(pid, deadline_s=30)
        os.kill(before, signal.SIGKILL)
        (process,) = [(await slot.begin()).child for slot in lane._slots]
        await process.wait()
        assert await lane.call(pid, deadline_s=30) != before


async def test_arguments_that_cannot_be_pickled_cost_no_process() -> None:
    async with ProcessLane("test", size=1) as lane:
        before = await lane.call(pid, deadline_s=30)
        with pytest.raises(AttributeError, match="lambda"):
            await lane.call(double, [lambda: None], deadline_s=30)
        assert await lane.call(pid, deadline_s=30) == before


async def test_leaving_while_a_process_starts_raises_in_its_caller() -> None:
    me = psutil.Process()
    before = set(me.children())
    async with ProcessLane("test", size=1, warm=(nap, 60.0)) as lane:
        calling = asyncio.create_task(lane.call(pid, deadline_s=30))
        await asyncio.sleep(0.1)
    with pytest.raises(LaneClosed):
        await calling
    assert set(me.children()) <= before


async def test_while_the_machine_is_out_of_files_only_those_calls_fail() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with ProcessLane("test", size=1) as lane:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        filled = [os.dup(0)]
        while filled[-1] < highest:  # numbers below it that are free
            filled.append(os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(filled) + 1, limit[1]))
        try:
            with pytest.raises(
                LaneCrashed, match=r"test0 could not start: .*Too many open files"
            ):
                await lane.call(pid, deadline_s=30)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            for number in filled:
                os.close(number)
        assert await lane.call(double, [1], deadline_s=30) == [2]


async def test_cancelling_a_caller_kills_its_call() -> None:
    async with ProcessLane("test", size=1) as lane:
        before = await lane.call(pid, deadline_s=30)
        spinning = asyncio.create_task(lane.call(spin, deadline_s=30))
        await asyncio.sleep(0.05)
        spinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spinning
        assert not psutil.pid_exists(before)


@pytest.mark.parametrize("seed", range(3))
async def test_callers_cancelled_at_any_moment_leave_nothing_behind(seed: int) -> None:
    """Callers are cancelled while they wait, start, run and end; no slot and no process is lost."""
    chance = random.Random(seed)
    me = psutil.Process()
    before = set(me.children())
    async with ProcessLane("test", size=2) as lane:
        for _ in range(8):
            calls = [
                asyncio.create_task(lane.call(nap, 0.05, deadline_s=30)) for _ in range(4)
            ]
            await asyncio.sleep(chance.random() * 0.3)
            for call in chance.sample(calls, 3):
                call.cancel()
                if chance.random() < 0.5:
                    await asyncio.sleep(0)
                    call.cancel()  # again, while the first cancellation is handled
            await asyncio.gather(*calls, return_exceptions=True)
        assert len(set(me.children()) - before) <= 2
        napping = [lane.call(nap, 0.2, deadline_s=30) for _ in range(2)]
        assert len(set(await asyncio.gather(*napping))) == 2, "both slots still work"
    assert set(me.children()) <= before


async def test_callers_beyond_the_bound_are_refused_and_the_others_are_served_in_order() -> (
    None
):
    async with ProcessLane("scores", size=1, max_waiting=3) as lane:
        done: list[int] = []

        async def caller(n: int) -> None:
            await lane.call(double, [n], deadline_s=30)
            done.append(n)

        callers = [asyncio.create_task(caller(n)) for n in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(LaneFull, match="scores already has 3 callers waiting"):
            await lane.call(pid, deadline_s=30)
        await asyncio.gather(*callers)
        assert done == [0, 1, 2, 3]


async def test_a_caller_waits_no_longer_than_the_bound_for_a_free_process() -> None:
    async with ProcessLane("test", size=1) as lane:
        napping = asyncio.create_task(lane.call(nap, 1.0, deadline_s=30))
        await asyncio.sleep(0)
        with pytest.raises(LaneTimeout, match=r"no process of test was free within 0\.1 s"):
            await lane.call(pid, deadline_s=30, queue_s=0.1)
        await napping


async def test_leaving_ends_calls_that_run_and_those_that_wait() -> None:
    async with ProcessLane("test", size=1) as lane:
        before = await lane.call(pid, deadline_s=30)
        running = asyncio.create_task(lane.call(spin, deadline_s=300))
        waiting = asyncio.create_task(lane.call(pid, deadline_s=300))
        await asyncio.sleep(0.05)
    for call in (running, waiting):
        with pytest.raises((LaneCrashed, LaneClosed)):
            await call
    assert not psutil.pid_exists(before)
    with pytest.raises(LaneError, match="closed"):
        await lane.call(pid, deadline_s=30)


async def test_a_slow_call_is_named_with_its_line() -> None:
    """That holds also for a call that never releases the GIL and is killed."""
    async with watched(stall_ms=50) as watch:
        lane = ProcessLane("test", size=1, label="reward", watch=watch, warm=(pid,))
        async with lane:
            await lane.call(double, [1], deadline_s=30)
            assert watch.take().stalls == ()
            for _ in range(3):
                await lane.call(nap, 0.4, deadline_s=30)
            (stall,) = watch.take().stalls
            assert stall == Stall(
                line_of(nap, "sleep"),
                "nap",
                3,
                stall.total_s,
                stall.longest_s,
                "lane",
                "reward `nap`",
            )
            assert stall.total_s >= 1.2
            assert 0.4 <= stall.longest_s < stall.total_s
            with pytest.raises(LaneTimeout):
                await lane.call(hold_the_gil, deadline_s=0.3)
            (stall,) = watch.take().stalls
            assert stall.where == line_of(hold_the_gil, "sleep")


async def test_threads_leave_the_loop_free() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await thread(time.sleep, 0.1)
    ticking.cancel()
    assert ticks > 10
