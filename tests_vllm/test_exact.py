"""With the right flags vLLM does what the trainer computes: tokens, logprobs, experts, reloads."""

import asyncio
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
import safetensors.numpy
from tests.doubles.engine import WITH_ROUTES

from rollway.inference.engines.control import open_control
from rollway.inference.engines.dialect import make_prompt
from rollway.inference.engines.engine import open_engine
from rollway.inference.engines.link import EngineAccess
from rollway.inference.engines.vllm import Vllm
from rollway.records.turn import Sampling, Turn
from rollway.vllm.binary_reply import SAFETENSORS
from tests_vllm.models import write_model
from tests_vllm.reference import Reference
from tests_vllm.servers import RIGHT, ROUTES, Server, external, serving, train

pytestmark = pytest.mark.anyio
EXACT = 1e-5


@pytest.fixture(scope="module")
def reference(moe: Path) -> Reference:
    return Reference(moe)


def check_turn(turn: Turn, reference: Reference) -> None:
    """Compare logprobs and routes of a turn with transformers."""
    ids = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
    logprobs, routes = reference.score(ids)
    drawn = logprobs[len(turn.prompt_ids) - 1 :]
    assert np.abs(turn.logprobs - drawn).max() < EXACT
    assert turn.routes is not None
    own = routes[turn.routes_start : len(ids) - 1]
    assert (np.sort(turn.routes) == np.sort(own)).all()


async def test_turns_and_routes_equal_those_of_transformers(
    right_moe: Server, reference: Reference
) -> None:
    """The second turn asks only for new routes. They are those that a full reply has."""
    prompt = make_prompt(np.arange(5, 45, dtype=np.int32))
    async with open_engine(EngineAccess(right_moe.url, 60), WITH_ROUTES) as engine:
        first = await engine.complete(prompt, Sampling(24), [], 0)
        check_turn(first, reference)
        row = np.concatenate((first.prompt_ids, first.completion_ids))
        longer = make_prompt(np.concatenate((row, prompt.ids[:7])), prompt)
        second = await engine.complete(longer, Sampling(24), [], len(row) - 1)
        check_turn(second, reference)
        whole = await engine.complete(longer, Sampling(24), [], 0)
        check_turn(whole, reference)
    assert first.routes is not None
    assert second.routes is not None
    assert whole.routes is not None
    prompt_rows = slice(len(row) - 1, len(longer))
    assert (second.routes[: len(longer) - len(row) + 1] == whole.routes[prompt_rows]).all()


def greedy(num_prompt: int, num_tokens: int = 20, start: int = 0) -> dict[str, Any]:
    """Return a request as rollway's client sends it, but greedy."""
    prompt = make_prompt(np.arange(3, num_prompt + 3, dtype=np.int32))
    body = Vllm().encode_request("policy", prompt, Sampling(num_tokens, 0.0), [], start)
    return {**json.loads(body), "ignore_eos": True}


def test_a_binary_reply_says_what_the_json_says(right_moe: Server) -> None:
    for start in (0, 30):
        body = greedy(50, start=start)
        choice = json.loads(right_moe.fetch("/v1/completions", body))["choices"][0]
        raw = right_moe.fetch("/v1/completions", body, Accept=SAFETENSORS)
        binary = safetensors.numpy.load(raw)
        assert binary["token_ids"].tolist() == choice["token_ids"]
        logprobs = choice["logprobs"]["token_logprobs"]
        assert np.abs(binary["logprobs"] - np.array(logprobs)).max() < EXACT
        assert bytes(binary["finish_reason"]).decode() == choice["finish_reason"]
        routes = np.load(io.BytesIO(pybase64.b64decode(choice["routed_experts"])))
        assert (binary["routes"] == routes).all()
        assert len(routes) == 50 + 20 - 1 - start


def test_a_pause_during_generation_loses_nothing(
    right_moe: Server, reference: Reference
) -> None:
    def draw(number: int) -> Any:
        body = greedy(10 + number, 300)
        return body["prompt"], json.loads(right_moe.fetch("/v1/completions", body))

    with ThreadPoolExecutor(16) as pool:
        drawing = [pool.submit(draw, number) for number in range(16)]
        right_moe.fetch("/pause?mode=keep", {})
        assert json.loads(right_moe.fetch("/is_paused"))["is_paused"]
        assert not all(future.done() for future in drawing)
        right_moe.fetch("/resume", {})
        replies = [future.result() for future in drawing]
    for prompt, reply in replies:
        choice = reply["choices"][0]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (300, "length")
        logprobs, _ = reference.score([*prompt, *choice["token_ids"]])
        drawn = logprobs[len(prompt) - 1 :]
        assert np.abs(drawn - np.array(choice["logprobs"]["token_logprobs"])).max() < EXACT


async def test_a_reload_with_the_plugin_is_exact(
    right_moe: Server, moe: Path, tmp_path: Path, reference: Reference
) -> None:
    other = write_model(tmp_path / "other", seed=3)
    texts = [list(range(start, start + 40)) for start in (1, 50, 200)]
    async with open_control(EngineAccess(right_moe.url, 60)) as control:
        facts = await control.read_facts()
        assert facts is not None
        assert facts.has_plugin
        for folder, model in ((other, Reference(other)), (moe, reference)):
            await control.load_weights(str(folder), 1)
            for text, answer in zip(texts, await control.probe(texts), strict=True):
                logprobs, routes = model.score(text)
                assert np.abs(logprobs - np.array(answer.logprobs)).max() < EXACT
                assert answer.routes is not None
                assert (np.sort(routes[: len(answer.routes)]) == np.sort(answer.routes)).all()


async def test_tokens_have_the_version_that_drew_them(
    right_moe: Server, moe: Path, tmp_path: Path, reference: Reference
) -> None:
    """Weights are loaded while replies are drawn. Each token has the logprob of the version that the
    plug-in says, and both versions have drawn some."""
    other = write_model(tmp_path / "other", seed=3)
    models = {1: reference, 2: Reference(other)}

    def draw(number: int) -> Any:
        body = greedy(10 + number, 300)
        raw = right_moe.fetch("/v1/completions", body, Accept=SAFETENSORS)
        return body["prompt"], safetensors.numpy.load(raw)

    async with open_control(EngineAccess(right_moe.url, 60)) as control:
        await control.read_facts()
        await control.load_weights(str(moe), 1)
        with ThreadPoolExecutor(16) as pool:
            drawing = [pool.submit(draw, number) for number in range(16)]
            await asyncio.sleep(0.5)
            await control.load_weights(str(other), 2)
            replies = [await asyncio.wrap_future(future) for future in drawing]
        await control.load_weights(str(moe), 1)
    seen = set()
    for prompt, reply in replies:
        ids, versions = reply["token_ids"].tolist(), reply["versions"]
        assert (np.diff(versions) >= 0).all()
        seen |= set(versions.tolist())
        for version, model in models.items():
            logprobs, _ = model.score([*prompt, *ids])
            errors = np.abs(logprobs[len(prompt) - 1 :] - reply["logprobs"])
            assert (errors[versions == version] < EXACT).all()
    assert seen == {1, 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_right_loads_raise_no_alarm(
    tmp_path: Path, moe: Path, folder: Path, dtype: str
) -> None:
    flags = (*RIGHT, *ROUTES, "--dtype", dtype)
    with serving(moe, folder / f"{dtype}.log", *flags) as server:
        run = train(tmp_path, moe, external(server), steps=51)
    assert run.code == 0, run.text
    assert "out of service" not in run.text
    assert len(run.metrics) == 51
    log = (run.folder / "logs" / "orchestrator.log").read_text()
    assert log.count("tokens differ by") >= 51, "every version was compared"
