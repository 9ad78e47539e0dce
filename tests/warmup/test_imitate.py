"""The warm-up builds the same model from the same recipe, and refuses a model of another recipe."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollway.config.sections import EnvConfig, ModelConfig, WarmupConfig
from rollway.config.specs import WarmupSpec, WatchSpec
from rollway.errors import ConfigError, ModelError
from rollway.warmup.imitate import warm_up
from rollway.warmup.recipe import WarmupMessage, WarmupProgress, is_built
from rollway.wire.pipe import BlockingPipe

NUMBERS = """
import rollway as rw


class Numbers(rw.Environment):
    def tasks(self):
        yield rw.Task("0", prompt="1+1?", answer=2)

    @rw.reward
    def exact(self, task, rollout):
        return 0.0
"""


def spec_of(folder: Path, *, seed: int = 0, **warmup: Any) -> WarmupSpec:
    short: dict[str, Any] = {"batch_size": 8, "solve_rate": 0.0, "max_steps": 12}
    return WarmupSpec(
        warmup=WarmupConfig(**{**short, **warmup}),
        model=ModelConfig(
            path=str(folder), renderer="qwen3", template={"enable_thinking": False}
        ),
        env=EnvConfig(id="reverse-text"),
        max_context=64,
        seed=seed,
        watch=WatchSpec(),
    )


def build(spec: WarmupSpec) -> bytes:
    parent, child = socket.socketpair()
    with parent, child:
        warm_up(spec, BlockingPipe(child))
        frame = BlockingPipe(parent).receive()
    assert frame is not None
    assert isinstance(msgspec.msgpack.decode(frame, type=WarmupMessage), WarmupProgress)
    return (Path(spec.model.path) / "model.safetensors").read_bytes()


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first = build(spec_of(tmp_path / "a"))
    assert build(spec_of(tmp_path / "b")) == first
    assert build(spec_of(tmp_path / "c", seed=1)) != first
    assert is_built(spec_of(tmp_path / "a"))
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "warmup.json"} <= files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"], (
        "no partial folder stays"
    )


def test_a_model_of_another_recipe_is_refused(tmp_path: Path) -> None:
    assert not is_built(spec_of(tmp_path / "a"))
    build(spec_of(tmp_path / "a"))
    with pytest.raises(ConfigError, match="other warm-up settings"):
        is_built(spec_of(tmp_path / "a", lr=1e-3))
    (tmp_path / "own").mkdir()
    with pytest.raises(ConfigError, match="not built by a warm-up"):
        is_built(spec_of(tmp_path / "own"))


def test_a_warm_up_that_misses_its_goal_is_an_error_and_leaves_no_folder(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match=r"solve rate of 0\.000 in 12 steps, not 0\.9"):
        build(spec_of(tmp_path / "a", solve_rate=0.9))
    assert list(tmp_path.iterdir()) == []


def test_an_environment_without_text_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text(NUMBERS)
    env = EnvConfig(id=str(tmp_path / "numbers.py"))
    spec = msgspec.structs.replace(spec_of(tmp_path / "a"), env=env)
    with pytest.raises(
        ConfigError, match=r"the answer of task '0' of '.*' is int; remove \[warmup\]"
    ):
        build(spec)
