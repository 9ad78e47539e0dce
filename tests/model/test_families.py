"""Model families that are kept working, each for what it has: docs/models.md lists many more."""

import pytest
from tools.model_table import try_family


@pytest.mark.parametrize(
    ("family", "packing"),
    [
        pytest.param("qwen3", "packed", id="dense"),
        pytest.param("mistral", "packed", id="window"),
        pytest.param("qwen3_next", "padded", id="linear attention"),
        pytest.param("deepseek_v3", "packed", id="sigmoid routers with groups"),
        pytest.param("glm4_moe", "packed", id="dense first layer"),
    ],
)
def test_a_family_opens_and_trains(family: str, packing: str) -> None:
    found = try_family(family)
    assert "error" not in found
    assert found["packing"] == packing
    assert found.get("replay", 0.0) == 0.0
    assert found["kl"] < 1e-6


def test_a_family_whose_training_differs_from_its_sampling_is_refused() -> None:
    """In training, this one draws its experts at random."""
    found = try_family("phimoe")
    assert found["error"].startswith("models of family 'phimoe' cannot be trained: ")
    assert "single: log-probabilities differ by " in found["error"]
