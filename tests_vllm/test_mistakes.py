"""Mistakes of users with vLLM end the run before a step trains on wrong data, and name the cause."""

from pathlib import Path

import pytest

from tests_vllm.models import write_adapter, write_model
from tests_vllm.servers import (
    EAGER,
    FLOAT32,
    PLUGIN,
    RIGHT,
    ROUTES,
    SAMPLED,
    Run,
    external,
    serving,
    train,
)  # fmt: skip

PLAIN = (*EAGER, *SAMPLED, *FLOAT32)


def assert_refused(run: Run, *texts: str, most_steps: int = 0) -> None:
    assert run.code == 1, run.text
    for text in texts:
        assert text in run.text, run.text
    assert len(run.metrics) <= most_steps, run.text


def test_settings_that_cannot_train(tmp_path: Path, moe: Path, folder: Path) -> None:
    flags = [word for word in PLAIN if word not in SAMPLED]
    with serving(moe, folder / "settings.log", *flags, "--max-model-len", "256") as server:
        url = external(server)
        refused = train(tmp_path, moe, url, "sampling.temperature=0.7")
        assert_refused(refused, "--logprobs-mode processed_logprobs")
        assert_refused(train(tmp_path, moe, url), "--enable-return-routed-experts")
        settings = ("engine.routes=false", "engine.max_context=512")
        assert_refused(
            train(tmp_path, moe, url, *settings), "takes 256 tokens", "--max-model-len"
        )


def test_development_mode_is_off(tmp_path: Path, dense: Path, folder: Path) -> None:
    off = {"VLLM_SERVER_DEV_MODE": "0"}
    with serving(dense, folder / "mode.log", *PLAIN, env=off) as server:
        assert_refused(train(tmp_path, dense, external(server)), "VLLM_SERVER_DEV_MODE=1")


def test_compiled_on_cpu(tmp_path: Path, moe: Path, folder: Path) -> None:
    flags = [word for word in RIGHT if word not in EAGER]
    with serving(moe, folder / "compiled.log", *flags, *ROUTES) as server:
        assert_refused(train(tmp_path, moe, external(server)), "--enforce-eager")


def test_other_weights_of_the_same_shape(tmp_path: Path, moe: Path, folder: Path) -> None:
    other = write_model(tmp_path / "other", seed=7)
    with serving(other, folder / "other.log", *RIGHT, *ROUTES) as server:
        refused = train(tmp_path, moe, external(server))
        assert_refused(refused, "does not serve the weights in model.path")


@pytest.mark.parametrize("changes", [{"vocab_size": 512}, {"hidden_size": 64}], ids=str)
def test_another_architecture_or_tokenizer(
    tmp_path: Path, dense: Path, folder: Path, changes: dict[str, int]
) -> None:
    other = write_model(tmp_path / "other", experts=0, **changes)
    with serving(other, folder / "architecture.log", *RIGHT) as server:
        refused = train(tmp_path, dense, external(server))
        assert_refused(refused, "does not serve the weights in model.path")


def test_plain_reload_of_experts(tmp_path: Path, moe: Path, folder: Path) -> None:
    with serving(moe, folder / "plain_moe.log", *PLAIN, *ROUTES) as server:
        refused = train(tmp_path, moe, external(server), steps=4)
        assert_refused(refused, "wrong layout", "--worker-extension-cls", most_steps=2)


def test_plain_reload_of_tied_embeddings(tmp_path: Path, tied: Path, folder: Path) -> None:
    with serving(tied, folder / "plain_tied.log", *PLAIN) as server:
        refused = train(tmp_path, tied, external(server), steps=4)
        assert_refused(refused, "tied embeddings", "--worker-extension-cls", most_steps=2)


def test_an_adapter_is_named(tmp_path: Path, dense: Path, folder: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", dense)
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={adapter}")
    with serving(dense, folder / "adapter.log", *PLAIN, *PLUGIN, *flags) as server:
        refused = train(tmp_path, dense, external(server, "tuned"))
        assert_refused(refused, "as an adapter of 'policy'", "engine.external.model")
