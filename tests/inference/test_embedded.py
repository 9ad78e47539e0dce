"""The embedded engine as a client meets it: real processes, real HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from tests.doubles.parts import ENGINE, serving_part

from rollway.config.sections import EngineConfig, ModelConfig
from rollway.config.specs import EngineSpec, WatchSpec
from rollway.errors import EngineError, PartDied
from rollway.inference.engines.control import open_control
from rollway.inference.engines.engine import connect
from rollway.inference.engines.prompt import prompt_of
from rollway.loop.processes.part import start_part
from rollway.model.load import load_model, save_weights
from rollway.records.engine import EngineLoad
from rollway.records.turn import Sampling

pytestmark = pytest.mark.anyio


def part(folder: Path, port: int = 0) -> EngineSpec:
    return EngineSpec(
        model=ModelConfig(path=str(folder), renderer="qwen3", template={"enable_thinking": False}),
        engine=EngineConfig(port=port, max_batch=8, max_context=128),
        weights=str(folder),
        version=2,
        seed=0,
        watch=WatchSpec(),
    )


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    async with serving_part("engine", ENGINE, part(folder)) as (_, address):
        yield address


async def post(url: str, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.json()


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def until(url: str, line: str) -> None:
    """Until the engine's metrics say so."""
    while line not in (await get(f"{url}/metrics"))[1]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_what_clients_see(tiny_moe: Path) -> None:
    """One server for the many small things: routes, errors, metrics, chat, open_control."""
    async with serving(tiny_moe) as url:
        name = tiny_moe.name
        assert await get(f"{url}/health") == (200, "")
        assert f'"{name}"' in (await get(f"{url}/v1/models"))[1]
        await completions(url, name)
        await chat(url, name)
        await errors(url, name)
        metrics = (await get(f"{url}/metrics"))[1]
        assert f'vllm:num_requests_running{{model_name="{name}"}} 0.0' in metrics
        assert "vllm:generation_tokens_total" in metrics
        assert (await get(f"{url}/weight_info"))[1] == '{"weight_version":"2"}'
        assert (await post(f"{url}/pause?mode=keep"))[0] == 200
        assert (await get(f"{url}/is_paused"))[1] == '{"is_paused":true}'
        await hanging_up(url, name)
        assert (await post(f"{url}/resume"))[0] == 200
        async with connect(url, routes=False, deadline_s=60) as engine:
            prompt = prompt_of(np.arange(5, dtype=np.int32))
            assert len((await engine.complete(prompt, Sampling(3), [], 0)).completion_ids) == 3


async def hanging_up(url: str, name: str) -> None:
    """While it is paused: a client that goes away takes its request with it."""
    async with connect(url, routes=False, deadline_s=60) as engine:
        prompt = prompt_of(np.arange(5, dtype=np.int32))
        asked = asyncio.create_task(engine.complete(prompt, Sampling(100), [], 0))
        await until(url, f'vllm:num_requests_waiting{{model_name="{name}"}} 1.0')
        asked.cancel()
        await until(url, f'vllm:num_requests_waiting{{model_name="{name}"}} 0.0')


async def completions(url: str, name: str) -> None:
    status, reply = await post(
        f"{url}/v1/completions", model=name, prompt=[1, 2, 3], max_tokens=4, logprobs=0, seed=5,
        return_token_ids=True,
    )  # fmt: skip
    assert status == 200
    choice = reply["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 4
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert choice["token_versions"] == [2] * 4
    assert reply["usage"]["total_tokens"] == 7


async def chat(url: str, name: str) -> None:
    status, reply = await post(
        f"{url}/v1/chat/completions", model=name, max_tokens=5, return_token_ids=True, logprobs=True,
        messages=[{"role": "user", "content": "hi"}],
    )  # fmt: skip
    assert status == 200
    choice = reply["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) <= 5
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]


async def errors(url: str, name: str) -> None:
    good: dict[str, Any] = {"model": name, "prompt": [1, 2, 3], "max_tokens": 4}
    for change, status, said in (
        ({"prompt": [1] * 200}, 400, "maximum context length is 128"),
        ({"prompt": [99999]}, 400, "between 0 and"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": "text"}, 400, "Expected `array`"),
        ({"model": "other"}, 404, "does not exist"),
        ({"temperature": -1}, 400, ">= 0"),
        ({"stream": True}, 400, "stream = True is not supported"),
        ({"n": 2}, 400, "n = 2 is not supported"),
        ({"logprobs": 3}, 400, "logprobs above 0"),
    ):
        got, reply = await post(f"{url}/v1/completions", **{**good, **change})
        assert got == status, (change, reply)
        assert said in reply["error"]["message"], (change, reply)
    status, reply = await post(f"{url}/pause?mode=abort")
    assert status == 400
    status, reply = await post(
        f"{url}/collective_rpc", method="reload_weights", kwargs={"weights_path": "/none"}
    )
    assert status == 500
    assert "no model folder '/none'" in reply["error"]["message"]


async def test_weights_change_under_requests_in_flight(tiny_moe: Path, tmp_path: Path) -> None:
    """Long requests go on with the new weights, and every token says which version drew it."""
    other = load_model(str(tiny_moe))
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    save_weights(other, tmp_path / "v3")
    async with (
        serving(tiny_moe) as url,
        connect(url, routes=True, deadline_s=60) as engine,
        open_control(url, model="", key="", deadline_s=60) as controlled,
    ):
        prompt = np.arange(5, dtype=np.int32)
        asked = [
            asyncio.create_task(engine.complete(prompt_of(prompt), Sampling(100), [], routes_start=0))
            for _ in range(8)
        ]
        while not (load := await controlled.load()) or not load.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert load == EngineLoad(load.running, load.waiting, load.running / 8)
        await controlled.update_weights(str(tmp_path / "v3"), 3)
        assert await controlled.weight_version() == "3"
        turns = await asyncio.gather(*asked)
        later = await engine.complete(prompt_of(prompt), Sampling(100), [], routes_start=0)
    spans = [set(turn.versions.tolist()) for turn in turns]
    assert all(versions <= {2, 3} for versions in spans)
    assert any(versions == {2, 3} for versions in spans), "an update came in the middle"
    assert set(later.versions.tolist()) == {3}
    ids = torch.tensor([[*prompt.tolist(), *later.completion_ids.tolist()]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(other.eval()(input_ids=ids).logits[0].float(), -1)
    expected = logprobs[4:-1].gather(-1, ids[0, 5:, None])[:, 0]
    np.testing.assert_allclose(later.logprobs, expected, atol=1e-4)


async def test_a_dead_core_ends_the_engine_with_the_reason(tiny_moe: Path) -> None:
    async with start_part("engine", ENGINE, part(tiny_moe)) as engine:
        listening = asyncio.create_task(engine.listen(lambda stats: None, lambda body: None))
        url = await engine.ready()
        (core,) = psutil.Process(engine.pid).children()
        core.kill()
        with pytest.raises(PartDied, match="model process died"):
            await listening
    with pytest.raises(EngineError, match="no engine at"):
        async with connect(url, routes=False, deadline_s=5):
            pass


async def test_a_busy_port_and_a_broken_model_are_one_line(tiny_moe: Path, tmp_path: Path) -> None:
    async with serving(tiny_moe) as url:
        port = int(url.rpartition(":")[2])
        async with start_part("engine", ENGINE, part(tiny_moe, port)) as second:
            with pytest.raises(PartDied, match=rf"engine\.port {port} cannot be bound"):
                await second.listen(lambda stats: None, lambda body: None)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_moe / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    async with start_part("engine", ENGINE, part(tmp_path)) as broken:
        with pytest.raises(PartDied, match="cannot load model") as said:
            await broken.listen(lambda stats: None, lambda body: None)
    assert "\n" not in str(said.value)
