"""An env server whose engine is a chat endpoint: real processes against a real HTTP server."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from psutil import Process
from tests.doubles.chat import LOGPROB, ChatDouble, chat_double, qwen3
from tests.doubles.env_server import ENVS, env_config, router_spec
from tests.doubles.parts import ROUTER, serving_part

from rollway.config.sections import ModelConfig
from rollway.envserver import client as envs
from rollway.errors import ConfigError
from rollway.inference.rendering.rendering import SyncRenderer
from rollway.inference.rendering.tokenizer import Tokenizer
from rollway.loop.processes.part import Parent
from rollway.orchestrator.shell.sources import from_env
from rollway.payload.reader import SegmentReader
from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.rollout import Failed, Outcome, Scored, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import Run
from rollway.wire.pipe import AsyncPipe

pytestmark = pytest.mark.anyio


def plus_one(text: str, nth: int) -> str | web.Response:
    if text == "Hello":
        return "Hello"
    n = int(text.rstrip("?"))
    if n == 90:
        return web.Response(status=500, text="out of order")
    if n == 80 and nth == 0:
        return web.Response(status=429, headers={"Retry-After": "0"})
    return str(n + 1)


@asynccontextmanager
async def serving(
    folder: Path, model: ModelConfig | None = None, renderer: SyncRenderer | None = None
) -> AsyncIterator[tuple[envs.EnvClient, ChatDouble]]:
    """Serve an environment, to a run that trains `model` if there is one. The endpoint returns token ids
    if it has a renderer."""
    async with chat_double(plus_one, renderer=renderer) as double:
        env = env_config(ENVS, "ThreeTurns", concurrency=8)
        spec = router_spec(env, model or ModelConfig(path=""), double.url, folder)
        part = msgspec.structs.replace(spec, speaks="messages", is_training=bool(model))
        async with (
            serving_part("test.router", ROUTER, part, folder / "router.log") as (_, address),
            envs.connect(address) as client,
        ):
            yield client, double


async def send(client: envs.EnvClient, number: int) -> None:
    task = Task(id=str(number), prompt=f"{number}?", answer=str(number + 3))
    run = Run(RolloutId(f"r{number}"), 1, task, Sampling(20), PolicyVersion(0), 0)
    await client.send(run)


async def outcome(client: envs.EnvClient, number: int) -> Outcome:
    await send(client, number)
    while not isinstance(message := await client.receive(), Settled):
        pass
    return message.outcome


async def test_rollouts_are_scored_without_rows_and_keep_their_transcript(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (client, double):
        scored = await outcome(client, 5)
        assert isinstance(scored, Scored), scored
        assert (scored.reward, scored.num_turns, scored.stop, scored.rows) == (
            1.0,
            3,
            "stop",
            (),
        )
        assert scored.num_sampled == 3, "as many as the endpoint counted"
        columns = SegmentReader(tmp_path).open(scored.ref)
        assert list(columns) == ["transcript"]
        transcript = msgspec.json.decode(columns["transcript"].tobytes())
        assert [message["content"] for message in transcript] == [
            "5?",
            "6",
            "6?",
            "7",
            "7?",
            "8",
        ]
        assert [len(request["messages"]) for request in double.requests] == [1, 3, 5]
        assert {request["model"] for request in double.requests} == {"double"}, (
            "the only model it lists"
        )
        later = await outcome(client, 80)
        assert isinstance(later, Scored), "the endpoint was asked again"
        failed = await outcome(client, 90)
        assert isinstance(failed, Failed)
        assert (failed.boundary, "HTTP 500: out of order" in failed.error) == ("engine", True)


@pytest.mark.parametrize("has_ids", [False, True])
async def test_a_run_that_trains_on_messages_gets_rows(
    tmp_path: Path, tiny_moe: Path, has_ids: bool
) -> None:
    """Token ids that the endpoint does not return are made from its text, in another process. No such
    process is started for an endpoint that returns them."""
    tokenizer, model = Tokenizer(str(tiny_moe)), qwen3(tiny_moe)
    renderer = SyncRenderer(model) if has_ids else None
    async with serving(tmp_path, model, renderer) as (client, double):
        scored = await outcome(client, 5)
        processes = Process().children(recursive=True)
        names = [" ".join(process.cmdline()) for process in processes]
    assert isinstance(scored, Scored), scored
    assert any(".tokenise" in name for name in names) is not has_ids, names
    greeting, *requests = double.requests
    assert greeting["return_token_ids"]
    assert {"return_token_ids" in request for request in requests} == {has_ids}
    assert {row.is_approximate for row in scored.rows} == {not has_ids}
    assert scored.num_sampled == scored.num_trainable
    reader, drawn = SegmentReader(tmp_path).open(scored.ref), []
    for number in range(len(scored.rows)):
        ids = reader[f"row{number}.token_ids"]
        sampled = reader[f"row{number}.loss_mask"] != 0
        drawn.append(tokenizer.decode(ids[sampled].tolist()))
        logprobs = reader[f"row{number}.logprobs"]
        assert (logprobs[sampled] == (LOGPROB if has_ids else 0)).all()
        assert tokenizer.decode(ids.tolist()).startswith("<|im_start|>user\n5?<|im_end|>")
    assert "".join(drawn) == "6<|im_end|>7<|im_end|>8<|im_end|>"


async def test_an_orchestrator_refuses_rollouts_that_cannot_be_trained(
    tmp_path: Path,
) -> None:
    child_end, parent_end = socket.socketpair()
    with parent_end:
        pipe = await AsyncPipe.open(child_end)
        parent = Parent(pipe, None)  # type: ignore[arg-type]
        async with serving(tmp_path) as (client, _):
            await send(client, 5)
            tracker = SimpleNamespace(progressed=print)  # a slow start is reported
            books: Any = SimpleNamespace(tracker=tracker)
            fleet: Any = None  # such a rollout never gets that far
            with pytest.raises(ConfigError, match="rollouts without token ids"):
                await from_env("env", client, asyncio.Queue(), books, parent, fleet)
        await pipe.close()
