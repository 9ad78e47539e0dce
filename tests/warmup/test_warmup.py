"""The warm-up builds the same model from the same recipe, and refuses another's."""

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


def part(folder: Path, *, seed: int = 0, **warmup: Any) -> WarmupSpec:
    small: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 1,
        "batch_size": 8,
        "solve_rate": 0.0,
        "max_steps": 12,
    }
    return WarmupSpec(
        warmup=WarmupConfig(**{**small, **warmup}),
        model=ModelConfig(path=str(folder), renderer="qwen3", template={"enable_thinking": False}),
        env=EnvConfig(id="reverse-text"),
        max_context=64,
        seed=seed,
        watch=WatchSpec(),
    )


def build(part: WarmupSpec) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        warm_up(part, BlockingPipe(theirs))
        frame = BlockingPipe(ours).receive()
    assert frame is not None
    assert isinstance(msgspec.msgpack.decode(frame, type=WarmupMessage), WarmupProgress)
    return (Path(part.model.path) / "model.safetensors").read_bytes()


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first = build(part(tmp_path / "a"))
    assert build(part(tmp_path / "b")) == first
    assert build(part(tmp_path / "c", seed=1)) != first
    assert is_built(part(tmp_path / "a"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b", "c"], "nothing half-built stays"


def test_a_model_of_another_recipe_is_refused(tmp_path: Path) -> None:
    assert not is_built(part(tmp_path / "a"))
    build(part(tmp_path / "a"))
    with pytest.raises(ConfigError, match="other warm-up settings"):
        is_built(part(tmp_path / "a", hidden_size=64))
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="not built by a warm-up"):
        is_built(part(tmp_path / "mine"))


def test_a_warm_up_that_gets_nowhere_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"solve rate of 0\.000 in 12 steps, not 0\.9"):
        build(part(tmp_path / "a", solve_rate=0.9))
    assert list(tmp_path.iterdir()) == []
