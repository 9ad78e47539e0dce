"""Code that refuses to end: its rollout ends all the same, alone, and its worker is replaced."""

from pathlib import Path

import pytest
from tests.doubles.env_server import serving
from tests.doubles.refusing import KINDS

from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Failed, Scored, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import Cancel, Run, RunGroup

pytestmark = [pytest.mark.anyio, pytest.mark.system]

REFUSING = str(Path(__file__).parents[1] / "doubles" / "refusing.py")
LINES = Path(REFUSING).read_text().splitlines()
DEADLINES = {"rollout_deadline_s": 5.0, "scoring_deadline_s": 2.0, "tool_deadline_s": 2.0}
NUM_GOOD = 6


async def test_a_rollout_whose_code_refuses_to_end_fails_alone_and_its_worker_is_replaced(
    tmp_path: Path, tiny_moe: Path
) -> None:
    count = len(KINDS) + NUM_GOOD
    options = {"concurrency": count, **DEADLINES}
    async with serving(tmp_path, tiny_moe, "Refusing", file=REFUSING, **options) as server:
        for n in range(count):
            await server.run(f"r{n}", str(n))
        ends = {n: await server.outcome(f"r{n}") for n in range(count)}
        refused = {kind: ends[n] for n, kind in enumerate(KINDS)}
        good = [ends[n] for n in range(len(KINDS), count)]
        assert all(isinstance(end, Scored) for end in good), good
        left = refused.pop("background")
        assert isinstance(left, Scored), "the rollout itself had ended"
        for kind, end in refused.items():
            assert isinstance(end, Failed), (kind, end)
            assert end.boundary == ("scorer" if kind == "reward" else "deadline"), (kind, end)
            assert "went on for 5 s after its deadline" in end.text, (kind, end)
            assert end.where.startswith(f"{REFUSING}:"), (kind, end)
            line = int(end.where.removeprefix(f"{REFUSING}:").split()[0])
            if kind != "speaks_on" and kind != "child":
                assert LINES[line - 1].endswith("# refuses"), (kind, end)
        assert all(
            settled.attempt == 1 for ends in server.settled.values() for settled in ends
        )
        await server.run("later", "20")
        assert isinstance(await server.outcome("later"), Scored)
        workers = {settled.worker for ends in server.settled.values() for settled in ends}
        assert {name.rpartition(".")[2] for name in workers} == {"0", "1"}, workers
        assert not server.lost, "the worker ended by itself"


async def test_a_group_reward_that_refuses_to_end_fails_its_group(
    tmp_path: Path, tiny_moe: Path
) -> None:
    options = {"concurrency": 8, **DEADLINES}
    async with serving(
        tmp_path, tiny_moe, "RefusingGroup", file=REFUSING, **options
    ) as server:
        for number in ("1", "2"):
            task = Task(id=number, prompt=f"{number}?")
            runs = [
                Run(RolloutId(f"r{number}.{n}"), 1, task, Sampling(20), PolicyVersion(0), 0)
                for n in range(4)
            ]
            await server.client.send(RunGroup.of(runs))
        bad = [await server.outcome(f"r1.{n}") for n in range(4)]
        good = [await server.outcome(f"r2.{n}") for n in range(4)]
        assert all(isinstance(end, Scored) for end in good), good
        for end in bad:
            assert isinstance(end, Failed)
            assert end.boundary == "scorer"
            assert "swallow" in end.where


async def test_a_cancelled_rollout_that_refuses_to_end_is_cancelled(
    tmp_path: Path, tiny_moe: Path
) -> None:
    options = {"concurrency": 8, "rollout_deadline_s": 600.0}
    async with serving(tmp_path, tiny_moe, "Refusing", file=REFUSING, **options) as server:
        number = str(KINDS.index("speaks_on"))
        await server.run("r", number)
        for count in (1, 0, 1):  # its first turn ends before it refuses
            await server.engine.until_running(count)
        await server.client.send(Cancel(RolloutId("r"), "too old"))
        await server.receive(Settled)
        (settled,) = server.settled["r"]
        assert settled.outcome.__class__.__name__ == "Cancelled"
        await server.run("later", "20")
        assert isinstance(await server.outcome("later"), Scored)
        assert server.settled["later"][0].worker.endswith(".1")
