"""The embedded engine as clients see it: real processes, real HTTP."""

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
from tests.doubles.engine import NO_ROUTES, WITH_ROUTES
from tests.doubles.parts import ENGINE, serving_part

from rollway.config.sections import EmbeddedEngineConfig, EngineConfig, ModelConfig
from rollway.config.specs import EngineSpec, WatchSpec
from rollway.errors import EngineError, PartDied
from rollway.inference.engines.control import open_control
from rollway.inference.engines.dialect import make_prompt
from rollway.inference.engines.engine import open_engine
from rollway.inference.engines.link import EngineAccess
from rollway.loop.processes.part import start_part
from rollway.model.load import load_model, save_weights
from rollway.records.engine import EngineLoad
from rollway.records.turn import Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.system]


def make_spec(folder: Path, port: int | None = None) -> EngineSpec:
    return EngineSpec(
        model=ModelConfig(
            path=str(folder), renderer="qwen3", template={"enable_thinking": False}
        ),
        engine=EngineConfig(
            max_context=128, embedded=EmbeddedEngineConfig(port=port, max_batch=8)
        ),
        weights=str(folder),
        version=2,
        seed=0,
        watch=WatchSpec(),
    )


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    async with serving_part("engine", ENGINE, make_spec(folder)) as (_, address):
        yield address


async def post(url: str, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.json()


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def wait_for_metric(url: str, line: str) -> None:
    """Wait until the engine's metrics hold this line."""
    while line not in (await get(f"{url}/metrics"))[1]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_every_request_of_a_client_is_answered(tiny_moe: Path) -> None:
    """One server for many small checks: completions, chat, errors, metrics, pausing, aborting."""
    async with serving(tiny_moe) as url:
        name = tiny_moe.name
        assert await get(f"{url}/health") == (200, "")
        assert f'"{name}"' in (await get(f"{url}/v1/models"))[1]
        await check_completions(url, name)
        await check_chat(url, name)
        await check_errors(url, name)
        metrics = (await get(f"{url}/metrics"))[1]
        assert f'vllm:num_requests_running{{model_name="{name}"}} 0.0' in metrics
        assert "vllm:generation_tokens_total" in metrics
        assert (await get(f"{url}/weight_info"))[1] == '{"weight_version":"default"}'
        assert (await post(f"{url}/pause?mode=keep"))[0] == 200
        assert (await get(f"{url}/is_paused"))[1] == '{"is_paused":true}'
        await check_abort(url, name)
        assert (await post(f"{url}/resume"))[0] == 200
        async with open_engine(EngineAccess(url, deadline_s=60), NO_ROUTES) as engine:
            prompt = make_prompt(np.arange(5, dtype=np.int32))
            assert (
                len((await engine.complete(prompt, Sampling(3), [], 0)).completion_ids) == 3
            )


async def check_abort(url: str, name: str) -> None:
    """The paused engine forgets the request of a client that closes its connection."""
    async with open_engine(EngineAccess(url, deadline_s=60), NO_ROUTES) as engine:
        prompt = make_prompt(np.arange(5, dtype=np.int32))
        request = asyncio.create_task(engine.complete(prompt, Sampling(100), [], 0))
        await wait_for_metric(url, f'vllm:num_requests_waiting{{model_name="{name}"}} 1.0')
        request.cancel()
        await wait_for_metric(url, f'vllm:num_requests_waiting{{model_name="{name}"}} 0.0')


async def check_completions(url: str, name: str) -> None:
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


async def check_chat(url: str, name: str) -> None:
    status, reply = await post(
        f"{url}/v1/chat/completions", model=name, max_tokens=5, return_token_ids=True, logprobs=True,
        messages=[{"role": "user", "content": "hi"}],
    )  # fmt: skip
    assert status == 200
    choice = reply["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) <= 5
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]


async def check_errors(url: str, name: str) -> None:
    good: dict[str, Any] = {"model": name, "prompt": [1, 2, 3], "max_tokens": 4}
    for change, expected_status, message in (
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
        status, reply = await post(f"{url}/v1/completions", **{**good, **change})
        assert status == expected_status, (change, reply)
        assert message in reply["error"]["message"], (change, reply)
    status, reply = await post(f"{url}/pause?mode=abort")
    assert status == 400
    status, reply = await post(
        f"{url}/collective_rpc", method="reload_weights", kwargs={"weights_path": "/none"}
    )
    assert status == 500
    assert "no model folder '/none'" in reply["error"]["message"]


async def test_weights_change_under_requests_in_flight(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """Long requests continue with the new weights, and every token has the version that drew it."""
    other = load_model(str(tiny_moe))
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    save_weights(other, tmp_path / "v3")
    async with (
        serving(tiny_moe) as url,
        open_engine(EngineAccess(url, deadline_s=60), WITH_ROUTES) as engine,
        open_control(EngineAccess(url, deadline_s=60)) as control,
    ):
        prompt = np.arange(5, dtype=np.int32)
        requests = [
            asyncio.create_task(
                engine.complete(make_prompt(prompt), Sampling(100), [], routes_start=0)
            )
            for _ in range(8)
        ]
        while not (load := await control.load()) or not load.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert load == EngineLoad(load.running, load.waiting, load.running / 8)
        await control.load_weights(str(tmp_path / "v3"), 3)
        await control.confirm(3)
        assert await control.weight_version() == "3"
        turns = await asyncio.gather(*requests)
        later = await engine.complete(make_prompt(prompt), Sampling(100), [], routes_start=0)
    versions_of_turns = [set(turn.versions.tolist()) for turn in turns]
    assert all(versions <= {2, 3} for versions in versions_of_turns)
    assert {2, 3} in versions_of_turns, "an update came in the middle of a turn"
    assert set(later.versions.tolist()) == {3}
    ids = torch.tensor([[*prompt.tolist(), *later.completion_ids.tolist()]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(other.eval()(input_ids=ids).logits[0].float(), -1)
    expected = logprobs[4:-1].gather(-1, ids[0, 5:, None])[:, 0]
    np.testing.assert_allclose(later.logprobs, expected, atol=1e-4)


async def test_a_busy_port_is_an_error_and_a_dead_decoder_ends_the_engine(
    tiny_moe: Path,
) -> None:
    async with start_part("engine", ENGINE, make_spec(tiny_moe)) as engine:
        listening = asyncio.create_task(engine.listen(lambda stats: None, lambda body: None))
        url = await engine.ready()
        await check_busy_port(tiny_moe, int(url.rpartition(":")[2]))
        (decoder,) = psutil.Process(engine.pid).children()
        decoder.kill()
        with pytest.raises(PartDied, match="decoder process died"):
            await listening
    with pytest.raises(EngineError, match="no engine at"):
        async with open_engine(EngineAccess(url, deadline_s=5), NO_ROUTES):
            pass


async def check_busy_port(model: Path, port: int) -> None:
    async with start_part("engine", ENGINE, make_spec(model, port)) as second:
        with pytest.raises(
            PartDied, match=rf"'engine\.embedded\.port' = {port} cannot be bound"
        ):
            await second.listen(lambda stats: None, lambda body: None)


async def test_a_broken_model_is_an_error_of_one_line(tiny_moe: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_moe / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    async with start_part("engine", ENGINE, make_spec(tmp_path)) as broken:
        with pytest.raises(PartDied, match="cannot load model") as caught:
            await broken.listen(lambda stats: None, lambda body: None)
    assert "\n" not in str(caught.value)
