"""A package that a setting needs and that is not installed is named in one line, before any start."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys

hidden = sys.argv[1]

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        is_hidden = name.partition(".")[0] == hidden
        return None if is_hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from rollway.cli.main import main
sys.argv = ["rollway", *sys.argv[2:]]
main()
"""
RUN = """
[model]
path = "{model}"
renderer = "qwen3"
[sampling]
max_tokens = 12
[[env]]
id = "reverse-text"
"""


@pytest.mark.parametrize(
    ("package", "key", "value", "message"),
    [
        (
            "wandb",
            "wandb_project",
            "mine",
            "'metrics.wandb_project' = 'mine' needs the package wandb",
        ),
        (
            "tensorboard",
            "tensorboard",
            "true",
            "'metrics.tensorboard' = true needs the package",
        ),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_has_it(
    tmp_path: Path, tiny_moe: Path, package: str, key: str, value: str, message: str
) -> None:
    (tmp_path / "run.toml").write_text('name = "x"' + RUN.format(model=tiny_moe))
    (
        tmp_path / package
    ).mkdir()  # a folder of this name, such as an old log folder, is not the package
    train = ["train", "run.toml", "--set", f"metrics.{key}={value}"]
    command = [sys.executable, "-c", WITHOUT, package, *train]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr.startswith(f"rollway: {message}")
    assert f"pip install 'rollway[{package}]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "outputs").exists()
