"""A whole env server: router, workers and lanes in real processes, against a real HTTP engine."""

import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from tests.doubles.engine import routes_of
from tests.doubles.env_server import ENVS, router_spec, serving
from tests.doubles.envs import FAILURES
from tests.doubles.parts import ROUTER

from rollway.config.sections import EnvConfig
from rollway.errors import PartDied
from rollway.loop.processes.part import start_part
from rollway.records.ids import RolloutId
from rollway.records.rollout import Cancelled, Failed, Scored
from rollway.wire.messages import Cancel, NextTasks, ServerStats, Tasks, WorkerLost

pytestmark = [pytest.mark.anyio, pytest.mark.system]


async def test_a_rollout_is_scored_and_its_row_is_what_the_engine_saw_and_drew(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(tmp_path, tiny_moe, "ThreeTurns") as server:
        await server.run("r", "5")
        outcome = await server.outcome("r")
        assert isinstance(outcome, Scored), outcome
        assert (outcome.reward, outcome.num_turns, outcome.stop) == (0.0, 3, "stop")
        columns = server.reader.open(outcome.ref)
        ids = columns["row0.token_ids"].tolist()
        assert ids == server.engine.prompts[-1] + server.engine.replies[-1]
        for prompt, reply in zip(server.engine.prompts, server.engine.replies, strict=True):
            assert ids[: len(prompt) + len(reply)] == prompt + reply
        expected = routes_of(ids)
        expected[-1] = 0
        np.testing.assert_array_equal(columns["row0.routes"], expected)
        drawn = sum(len(reply) for reply in server.engine.replies)
        assert int(columns["row0.loss_mask"].sum()) == drawn == outcome.num_trainable
        transcript = msgspec.json.decode(columns["transcript"].tobytes())
        assert [message["content"] for message in transcript] == [
            "5?",
            "6",
            "6?",
            "7",
            "7?",
            "8",
        ]


async def test_tasks_come_in_order_and_rollouts_run_at_once(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(tmp_path, tiny_moe, "Counting", workers=2, latency_s=0.05) as server:
        await server.client.send(NextTasks(3, 5))
        tasks = await server.receive(Tasks)
        assert [task.id for task in tasks.tasks] == ["3", "4", "5", "6", "7"]
        for n in range(40):
            await server.run(f"r{n}", str(n))
        outcomes = [await server.outcome(f"r{n}") for n in range(40)]
        assert all(
            isinstance(outcome, Scored) and outcome.reward == 1.0 for outcome in outcomes
        )
        assert all(len(ends) == 1 for ends in server.settled.values())
        while not {"test.router"} < {stats.process for stats in server.stats}:
            await server.receive(ServerStats)


async def test_a_rollout_says_how_long_it_waited_for_a_worker(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(
        tmp_path, tiny_moe, "Counting", concurrency=1, latency_s=0.2
    ) as server:
        await server.run("first", "1")
        await server.run("second", "2")
        first, second = await server.outcome("first"), await server.outcome("second")
        assert isinstance(first, Scored)
        assert isinstance(second, Scored)
        assert 0 <= first.timing.queue_s < second.timing.queue_s
        assert second.timing.queue_s > 0.1, "the other took at least twice as long"


async def test_few_calls_lie_between_the_event_loop_and_an_environments_rollout(
    tmp_path: Path, tiny_moe: Path
) -> None:
    """An author who reads a traceback should find the first own line soon."""
    async with serving(tmp_path, tiny_moe, "CountsFrames") as server:
        await server.run("r", "1")
        outcome = await server.outcome("r")
        assert isinstance(outcome, Scored), outcome
        assert 1 <= outcome.metrics["num_frames"] <= 4


@pytest.mark.parametrize("has_uvloop", [True, False])
async def test_a_server_runs_with_uvloop_and_without_it(
    has_uvloop: bool, tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_uvloop:
        broken = tmp_path / "packages" / "uvloop.py"
        broken.parent.mkdir()
        broken.write_text("raise ImportError('not installed')\n")
        monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    async with serving(tmp_path, tiny_moe, "NamesItsLoop") as server:
        for n in range(20):
            await server.run(f"r{n}", str(n))
        for n in range(20):
            outcome = await server.outcome(f"r{n}")
            assert isinstance(outcome, Scored), outcome
            assert outcome.metrics["is_uvloop"] == has_uvloop


async def test_failures_name_their_boundary(tmp_path: Path, tiny_moe: Path) -> None:
    """Each task fails in its own way; the message says whose fault it is. The last does not fail."""
    expected = {
        "raises": ("env", "no such thing"),
        "says_nothing": ("env", "never spoke"),
        "cancels_itself": ("env", "CancelledError"),
        "sleeps": ("deadline", "longer than 6 s"),
        "spins": ("scorer", f"longer than 5 s and was killed, at {ENVS}:"),
        "dies": ("scorer", "exit code 3"),
        "cannot_judge": ("scorer", "cannot judge"),
        "nan": ("scorer", "right returned nan"),
    }
    assert (*expected, "none") == FAILURES
    deadlines = {"rollout_deadline_s": 6.0, "scoring_deadline_s": 5.0}
    async with serving(tmp_path, tiny_moe, "Failing", **deadlines) as server:
        for number, (how, (boundary, error)) in enumerate(expected.items()):
            await server.run(how, str(number))
            outcome = await server.outcome(how)
            assert isinstance(outcome, Failed), (how, outcome)
            assert outcome.boundary == boundary, (how, outcome)
            assert error in outcome.text, (how, outcome)
            if how == "raises":
                assert "chat" not in outcome.traceback.splitlines()[1]
                assert "envs.py" in outcome.traceback
        await server.run("none", str(len(expected)))
        assert isinstance(await server.outcome("none"), Scored), "the lane came back"


async def test_an_engine_that_is_gone_fails_the_rollout_not_the_worker(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(tmp_path, tiny_moe, "AsyncReward") as server:
        await server.run("good", "0")
        scored = await server.outcome("good")
        assert isinstance(scored, Scored)
        assert scored.reward == 0.25
        server.engine.answer = lambda prompt: str(1 / 0)
        await server.run("bad", "0")
        failed = await server.outcome("bad")
        assert isinstance(failed, Failed)
        assert failed.boundary == "engine"
        assert "500" in failed.error


async def test_payload_that_cannot_be_written_fails_its_rollout_and_nothing_else(
    tmp_path: Path, tiny_moe: Path
) -> None:
    gone = tmp_path / "envs.w0.0-0000.seg"
    gone.symlink_to(tmp_path / "no" / "folder")
    async with serving(tmp_path, tiny_moe, "Counting") as server:
        await server.run("bad", "0")
        failed = await server.outcome("bad")
        assert isinstance(failed, Failed)
        assert failed.boundary == "worker"
        assert f"to {gone}: File exists" in failed.error
        gone.unlink()
        await server.run("good", "0")
        scored = await server.outcome("good")
        assert isinstance(scored, Scored)
        server.reader.verify(scored.ref)


async def test_cancel_reaches_the_engine(tmp_path: Path, tiny_moe: Path) -> None:
    async with serving(tmp_path, tiny_moe, "Counting", latency_s=30) as server:
        for n in range(20):  # 8 run, 12 wait in the router
            await server.run(f"r{n}", str(n))
        await server.engine.until_running(8)
        for n in reversed(
            range(20)
        ):  # the waiting ones first, so that none of them gets a credit
            await server.client.send(Cancel(RolloutId(f"r{n}"), "no longer needed"))
        for n in range(20):
            assert await server.outcome(f"r{n}") == Cancelled("no longer needed")
        await server.engine.until_running(0)
        assert server.engine.num_aborted == 8


async def test_a_rollout_cancelled_before_it_begins_settles_too(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(
        tmp_path, tiny_moe, "Counting", latency_s=30, concurrency=64
    ) as server:
        await server.until_up(1)
        for n in range(50):
            await server.run(f"r{n}", str(n))
            await server.client.send(Cancel(RolloutId(f"r{n}"), "at once"))
        for n in range(50):
            assert await server.outcome(f"r{n}") == Cancelled("at once")


async def test_a_killed_workers_rollouts_move_and_settle_once(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(tmp_path, tiny_moe, "Counting", workers=2) as server:
        await server.until_up(2)
        replies = server.hold_replies()
        for n in range(16):
            await server.run(f"r{n}", str(n))
        await server.engine.until_running(16)
        victim = server.workers()[0]
        lanes = victim.children(recursive=True)
        os.kill(victim.pid, signal.SIGKILL)
        await server.receive(WorkerLost)
        replies.set()
        outcomes = [await server.outcome(f"r{n}") for n in range(16)]
        assert all(isinstance(outcome, Scored) for outcome in outcomes)
        assert sorted({ends[0].attempt for ends in server.settled.values()}) == [1, 2]
        assert all(len(ends) == 1 for ends in server.settled.values())
        assert [(lost.num_moved, lost.num_failed) for lost in server.lost] == [(8, 0)]
        psutil.wait_procs(lanes, timeout=60)
        assert not [lane for lane in lanes if lane.is_running()]
        server.stats.clear()
        await server.until_up(2)


async def test_a_task_that_kills_workers_fails_and_the_others_do_not(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(tmp_path, tiny_moe, "KillsWorker", concurrency=1) as server:
        for n in range(3):
            await server.run(f"r{n}", str(n))
        failed = await server.outcome("r1")
        assert isinstance(failed, Failed)
        assert failed.boundary == "worker"
        for other in ("r0", "r2"):
            assert isinstance(await server.outcome(other), Scored)


async def test_a_line_that_blocks_the_loop_is_named(tmp_path: Path, tiny_moe: Path) -> None:
    async with serving(tmp_path, tiny_moe, "Blocks") as server:
        await server.run("r", "0")
        await server.outcome("r")
        while not (stalls := [stall for stats in server.stats for stall in stats.stalls]):
            await server.receive(ServerStats)
        assert stalls[0].where.startswith(ENVS)
        assert stalls[0].function.endswith("Blocks.rollout")
        assert stalls[0].longest_s > 0.4


async def test_a_slow_reward_is_named_and_does_not_block_the_loop(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with serving(tmp_path, tiny_moe, "Ponders") as server:
        await server.run("r", "1")
        assert isinstance(await server.outcome("r"), Scored)
        while not (stalls := [stall for stats in server.stats for stall in stats.stalls]):
            await server.receive(ServerStats)
        (stall,) = stalls
        assert (stall.kind, stall.call) == ("lane", "reward `Ponders.right`")
        assert stall.where.startswith(f"{ENVS}:")
        assert stall.function == "ponder"
        assert stall.longest_s >= 0.3
        log = (tmp_path / "envs.w0.log").read_text()
        assert (
            f"reward `Ponders.right` took {stall.longest_s * 1000:.0f} ms in its process"
            in log
        )


async def test_bad_frames_do_not_end_the_router(tmp_path: Path, tiny_moe: Path) -> None:
    async with serving(tmp_path, tiny_moe, "Counting") as server:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(server.address)
            for frame in (b"", b"garbage", b"\x81\xa4type\xa3run", bytes(10_000)):
                stranger.send(frame)
            stranger.send_multipart([b"a", b"b", b"c"])
        await server.run("r", "0")
        assert isinstance(await server.outcome("r"), Scored)


async def test_an_unknown_environment_ends_the_server_with_one_line(
    tmp_path: Path, tiny_moe: Path
) -> None:
    part = router_spec(EnvConfig(id="revers-text"), tiny_moe, "http://127.0.0.1:9", tmp_path)
    async with start_part("test.router", ROUTER, part, log=tmp_path / "router.log") as router:
        with pytest.raises(
            PartDied, match=r"no environment 'revers-text'; did you mean 'reverse-text'"
        ):
            await router.listen(lambda stats: None, lambda body: None)
