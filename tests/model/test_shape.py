"""What config.json says of a model, in the words of several families."""

import json
from pathlib import Path
from typing import Any

import pytest
from tools.model_table import tiny_config

from rollway.errors import ConfigError
from rollway.model.shape import ModelShape, check_room, check_routes, read_shape


def shape_of(folder: Path, **settings: Any) -> ModelShape | None:
    (folder / "config.json").write_text(json.dumps(settings))
    return read_shape(str(folder))


def test_the_shape_is_read_from_the_models_config(tmp_path: Path) -> None:
    assert read_shape(str(tmp_path)) is None
    assert shape_of(
        tmp_path, num_hidden_layers=48, num_experts_per_tok=8, num_experts=128, vocab_size=9
    ) == ModelShape(num_layers=48, topk=8, num_experts=128, vocab_size=9)
    nested = {"num_hidden_layers": 2, "num_experts_per_tok": 1}
    assert shape_of(tmp_path, text_config=nested) == ModelShape(num_layers=2, topk=1)
    dbrx = {"moe_num_experts": 16, "moe_top_k": 4}
    assert shape_of(tmp_path, ffn_config=dbrx) == ModelShape(num_experts=16, topk=4)
    dense = shape_of(tmp_path, num_hidden_layers=2)
    assert dense is not None
    assert not dense.has_experts


@pytest.mark.parametrize(
    ("family", "moe_layers"),
    [
        ("qwen3", None),
        ("qwen3_moe", (0, 1, 2, 3)),
        ("glm4_moe", (1, 2, 3)),
        ("deepseek_v3", (1, 2, 3)),
        ("mixtral", None),
        ("gpt_oss", None),
        ("lfm2_moe", (2, 3)),
    ],
)
def test_layers_with_experts_are_found(
    tmp_path: Path, family: str, moe_layers: tuple[int, ...] | None
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert shape is not None
    assert (shape.family, shape.vocab_size, shape.num_layers) == (family, 300, 4)
    assert shape.moe_layers == moe_layers
    is_dense = family == "qwen3"
    assert shape.has_experts != is_dense
    assert (shape.num_experts, shape.topk) == ((0, 0) if is_dense else (8, 2))


def test_routes_of_a_model_without_experts_are_refused(tmp_path: Path) -> None:
    tiny_config("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"family 'qwen3'\) has no experts: remove the key"):
        check_routes(str(tmp_path), wanted=True)
    for wanted in (None, False):
        check_routes(str(tmp_path), wanted)


@pytest.mark.parametrize(
    ("settings", "max_context"),
    [
        ({}, 0),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096}, 4096),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0]},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 2048,
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "factor": 4.0}
                },
            },
            2048,
        ),
    ],
)
def test_the_longest_text_is_found(
    tmp_path: Path, settings: dict[str, Any], max_context: int
) -> None:
    """Rotary positions that change with the length of a text limit it."""
    shape = shape_of(tmp_path, **settings)
    assert shape is not None
    assert shape.max_context == max_context


def test_replies_longer_than_a_text_that_the_model_takes_are_refused(tmp_path: Path) -> None:
    tiny_config("gpt2").save_pretrained(tmp_path)
    check_room(str(tmp_path), 511)
    with pytest.raises(ConfigError, match=r"max_tokens is 512, .* texts of up to 512 tokens"):
        check_room(str(tmp_path), 512)
