"""Names of tensors, read from real safetensors files."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rollway.errors import ModelError
from rollway.model.checkpoint import check_complete, tensor_names


def write(folder: Path, file: str, *names: str) -> None:
    tensors = {name: np.zeros(2, np.float32) for name in names}
    safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})


def test_the_tensors_of_all_parts_are_listed(tmp_path: Path) -> None:
    write(tmp_path, "model-00001-of-00002.safetensors", "a", "b")
    write(tmp_path, "model-00002-of-00002.safetensors", "c")
    assert tensor_names(tmp_path) == {"a", "b", "c"}
    assert check_complete(tmp_path, frozenset("ab")) == {"a", "b", "c"}


def test_a_tensor_that_earlier_versions_had_is_missed(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors", "q_proj", "v_proj")
    with pytest.raises(ModelError, match=r"lack 1 tensors .* such as 'k_proj'"):
        check_complete(tmp_path, frozenset(("q_proj", "k_proj", "v_proj")))


def test_weights_that_lie_elsewhere_are_taken_to_be_whole(tmp_path: Path) -> None:
    assert check_complete(tmp_path / "elsewhere", frozenset("a")) == {"a"}


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a complete"):
        tensor_names(tmp_path)
