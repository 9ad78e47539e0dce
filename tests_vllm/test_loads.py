"""A load that goes wrong takes the engine out of service before it draws a token for training."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.orchestrator.builders import core_spec

from rollway.config.sections import EngineConfig, PayloadConfig, TransportConfig
from rollway.config.specs import OrchestratorSpec, WatchSpec
from rollway.errors import EngineError, ModelError
from rollway.loop.processes.part import first_cause
from rollway.orchestrator.core.commands import UpdateWeights
from rollway.orchestrator.shell.fleet import EngineFleet, open_fleet
from rollway.records.ids import PolicyVersion, Step
from rollway.records.probe import PROBE_FILE, Probe, ProbeText
from rollway.records.turn import Sampling
from rollway.rundir.rundir import RunDir
from tests_vllm.models import copy_without, write_model
from tests_vllm.reference import Reference
from tests_vllm.servers import Server

pytestmark = pytest.mark.anyio
TEXTS = [tuple(range(start, start + 12)) for start in range(1, 240, 10)]


def write_probe(
    folder: Path, version: int, before: Reference | None, model: Reference
) -> None:
    """Write what a trainer with this model would write beside its weights."""
    texts = []
    for text in TEXTS:
        logprobs, routes = model.score(list(text))
        old = tuple(before.score(list(text))[0].tolist()) if before else ()
        experts = routes.astype(np.uint16).tobytes()
        texts.append(ProbeText(text, tuple(logprobs.tolist()), old, experts))
    probe = Probe(PolicyVersion(version), "float32", tuple(texts), None, (0, 1), 2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROBE_FILE).write_bytes(msgspec.msgpack.encode(probe))


def fleet_spec(server: Server, model: Path, run: RunDir) -> OrchestratorSpec:
    return OrchestratorSpec(
        core=core_spec(),
        sampling=Sampling(8),
        envs=(),
        engine_urls=(server.url,),
        engine=EngineConfig(),
        weights=str(model),
        model_path=str(model),
        must_push=True,
        payload=PayloadConfig(),
        transport=TransportConfig(),
        first_step=Step(1),
        run_dir=str(run.path),
        watch=WatchSpec(),
    )


async def say(text: str) -> None: ...


async def refusal_of(fleet: EngineFleet, folder: Path) -> str:
    """Return why the only engine may not be used after it was given these weights as version 1."""
    with pytest.raises(BaseExceptionGroup) as raised:
        await fleet.update(UpdateWeights(PolicyVersion(1), str(folder)))
    cause = first_cause(raised.value)
    assert isinstance(cause, EngineError)
    return str(cause)


@pytest.mark.parametrize(
    "tensor",
    [
        "lm_head.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.experts.3.down_proj.weight",
    ],
)
async def test_a_first_checkpoint_that_lacks_a_tensor(
    tmp_path: Path, right_moe: Server, moe: Path, tensor: str
) -> None:
    """vLLM takes it without a word, and keeps old values, or garbage in a part of a fused tensor."""
    whole, run = write_model(tmp_path / "whole", seed=3), RunDir(tmp_path / "run")
    lacking = copy_without(whole, tmp_path / "lacking", tensor)
    before, after = Reference(moe), Reference(whole)
    write_probe(run.weights_of(PolicyVersion(0)), 0, None, before)
    write_probe(lacking, 1, before, after)
    async with open_fleet(fleet_spec(right_moe, moe, run), say, lambda: True) as fleet:
        refusal = await refusal_of(fleet, lacking)
        assert fleet.refused == (right_moe.url,)
    assert "Likely cause" in refusal or "are not numbers" in refusal
    assert "no other engine is left" in refusal


async def test_a_later_checkpoint_that_lacks_a_tensor(
    tmp_path: Path, right_moe: Server, moe: Path
) -> None:
    """The names of the tensors tell, before anything is loaded."""
    whole, run = write_model(tmp_path / "whole", seed=3), RunDir(tmp_path / "run")
    lacking = copy_without(moe, tmp_path / "lacking", "lm_head.weight")
    before, after = Reference(moe), Reference(whole)
    write_probe(run.weights_of(PolicyVersion(0)), 0, None, before)
    write_probe(whole, 1, before, after)
    async with open_fleet(fleet_spec(right_moe, moe, run), say, lambda: True) as fleet:
        await fleet.update(UpdateWeights(PolicyVersion(1), str(whole)))
        with pytest.raises(ModelError, match="lm_head"):
            await fleet.update(UpdateWeights(PolicyVersion(2), str(lacking)))


async def test_a_load_that_fails_is_not_resumed(
    tmp_path: Path, right_moe: Server, moe: Path
) -> None:
    """vLLM has a broken model then, and would die of the next request. This test comes last: it leaves
    the server paused."""
    other, run = write_model(tmp_path / "other", hidden_size=64), RunDir(tmp_path / "run")
    write_probe(run.weights_of(PolicyVersion(0)), 0, None, Reference(moe))
    async with open_fleet(fleet_spec(right_moe, moe, run), say, lambda: True) as fleet:
        assert "cannot load version 1" in await refusal_of(fleet, other)
    assert right_moe.is_healthy()
    assert b"true" in right_moe.fetch("/is_paused")
