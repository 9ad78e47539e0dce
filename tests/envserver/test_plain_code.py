"""Plain code and tools in a real env server: router, worker and lanes are separate processes."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.doubles.env_server import router_spec
from tests.doubles.parts import ROUTER, serving_part

from rollway.config.sections import EnvConfig, ServerConfig
from rollway.envserver import client as envs
from rollway.payload.reader import SegmentReader
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Failed, Outcome, Scored, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.testing import Answer, PolicyPrompt, call, scripted_engine
from rollway.testing.model import model
from rollway.wire.messages import Run

pytestmark = pytest.mark.anyio

PLAIN = str(Path(__file__).parents[1] / "doubles" / "plain.py")


@asynccontextmanager
async def serving(
    folder: Path, env: EnvConfig, answer: Answer
) -> AsyncIterator[envs.EnvClient]:
    async with scripted_engine(answer) as engine:
        part = router_spec(env, model(), engine.url, folder)
        async with (
            serving_part("test.router", ROUTER, part, folder / "router.log") as (_, address),
            envs.connect(address) as client,
        ):
            yield client


async def outcome(client: envs.EnvClient, task: Task) -> Outcome:
    await client.send(Run(RolloutId(task.id), 1, task, Sampling(500), PolicyVersion(0), 0))
    while not isinstance(message := await client.receive(), Settled):
        pass
    return message.outcome


def adding(prompt: PolicyPrompt) -> str:
    if prompt.last_text == "hello":
        return prompt.last_text
    if prompt.results:
        return str(msgspec.json.decode(prompt.last_text)[0])
    if found := re.match(r"add (\d+) (\d+)", prompt.last_text):
        return call("add", a=int(found[1]), b=int(found[2]))
    raise ValueError(f"no task says {prompt.last_text!r}")


async def test_plain_code_runs_in_another_process_and_speaks_through_its_worker(
    tmp_path: Path,
) -> None:
    env = EnvConfig(id=PLAIN, server=ServerConfig(workers=1, rollout_deadline_s=20.0))
    async with serving(tmp_path, env, adding) as client:
        scored = await outcome(client, Task("0", "add 1 2"))
        assert isinstance(scored, Scored), scored
        assert (scored.reward, scored.metrics) == (1.0, {"is_elsewhere": 1.0})
        assert (scored.num_turns, len(scored.rows)) == (4, 2), "the child's row is there"
        columns = SegmentReader(tmp_path).open(scored.ref)
        transcript = msgspec.json.decode(columns["transcript"].tobytes())
        assert [message["role"] for message in transcript] == [
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        endless = await outcome(client, Task("endless", "add 1 2"))
        assert isinstance(endless, Scored), endless
        assert (endless.stop, endless.num_turns) == ("max_turns", 7)
        stuck = await outcome(client, Task("stuck", "add 1 2"))
        assert isinstance(stuck, Failed)
        assert stuck.boundary == "deadline"
        assert stuck.where.startswith(f"{PLAIN}:")
        again = await outcome(client, Task("again", "add 1 2"))
        assert isinstance(again, Scored), "the process that was stuck was replaced"


async def test_a_built_in_environment_with_tools_is_served(tmp_path: Path) -> None:
    def computing(prompt: PolicyPrompt) -> str:
        return prompt.last_text if prompt.results else call("multiply", a=6, b=7)

    server = ServerConfig(workers=1)
    env = EnvConfig(
        id="rollway.envs.builtin.calculator", args={"num_operations": 1}, server=server
    )
    async with serving(tmp_path, env, computing) as client:
        scored = await outcome(client, Task("0", "6 * 7", answer=42))
        assert isinstance(scored, Scored), scored
        assert (scored.reward, scored.metrics) == (1.0, {"calls": 1.0})
