"""Environments are found by name, and those that are found and cannot be used are refused."""

from pathlib import Path

import pytest

import rollway as rw
from rollway.errors import EnvironmentInvalid, EnvironmentNotFound

CLASS = """
class {name}(rw.Environment):
    def tasks(self):
        return []

    @rw.reward
    def right(self, task, rollout):
        return 1.0
"""


def test_an_unknown_environment_gets_a_hint() -> None:
    with pytest.raises(
        EnvironmentNotFound,
        match=r"no environment 'revers-text'; did you mean 'reverse-text'\?",
    ):
        rw.load_environment("revers-text")
    with pytest.raises(EnvironmentNotFound, match="no environment file at"):
        rw.load_environment("nowhere/env.py")


def test_an_argument_that_an_environment_does_not_take_is_refused() -> None:
    with pytest.raises(EnvironmentInvalid, match=r"does not take these args: .*'colour'"):
        rw.load_environment("reverse-text", colour="red")


@pytest.mark.parametrize("names", [(), ("First", "Second")])
def test_a_file_must_say_which_class_is_the_environment(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    classes = "".join(CLASS.format(name=name) for name in names)
    path = tmp_path / "env.py"
    path.write_text(f"import rollway as rw\n{classes}")
    with pytest.raises(
        EnvironmentInvalid, match=f"has {len(names)} Environment classes and no load_env"
    ):
        rw.load_environment(str(path))
    chosen = tmp_path / "chosen.py"
    chosen.write_text(
        f"import rollway as rw\n{classes or CLASS.format(name='First')}load_environment = First\n"
    )
    assert type(rw.load_environment(str(chosen))).__name__ == "First"


def test_a_file_that_fails_to_load_is_read_again_once_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise KeyError('broken')")
    with pytest.raises(KeyError):
        rw.load_environment(str(path))
    path.write_text("import rollway as rw\n" + CLASS.format(name="Mended"))
    assert type(rw.load_environment(str(path))).__name__ == "Mended"
