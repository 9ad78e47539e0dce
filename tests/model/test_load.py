"""Folders that cannot be a model are refused with the reason, and what is published can be loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tools.model_table import tiny_model

from rollway.errors import ModelError
from rollway.model.load import float32_names, load_model, load_weights, save_weights

LOST = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_a_folder_that_lacks_a_tensor_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[LOST]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"lack 1 of the model's tensors, such as '{LOST}'"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"vocab_size": 200},
            r"do not fit its config.json: '.*' is \[300, 64\], and not \[200",
        ),
        ({"layer_types": ["full_attention"]}, r"cannot load model '.*': .*layer"),
        ({"hidden_act": "unheard"}, "cannot load model '.*': .*unheard"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"are quantized \(mxfp4\): "),
    ],
)
def test_settings_that_cannot_be_used_are_named(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    change_config(folder, **settings)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder))


def test_what_is_published_loads_although_the_folder_named_code(
    folder: Path, tmp_path: Path
) -> None:
    """Many models bring code that transformers does not need any more. It is not published."""
    change_config(folder, auto_map={"AutoConfig": "configuration_x.Config"})
    model = load_model(str(folder))
    save_weights(model, tmp_path / "published")
    load_weights(model, str(tmp_path / "published"), trusts_code=True)


def test_defaults_for_sampling_that_transformers_does_not_save(
    folder: Path, tmp_path: Path
) -> None:
    settings = {"temperature": 0.9, "top_p": 0.6, "do_sample": False, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = load_model(str(folder))
    save_weights(model, tmp_path / "published")
    assert model.generation_config.top_p == 0.6


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "olmo_hybrid", "qwen3_moe", "glm4_moe"])
def test_what_a_family_keeps_in_float32_is_known(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    rounded = load_model(str(tmp_path), "bfloat16")
    kept = {
        name for name, weight in rounded.named_parameters() if weight.dtype == torch.float32
    }
    assert kept == float32_names(model) & dict(model.named_parameters()).keys()
