"""`rollway init`: a new environment as a package, with a test that passes."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from ..envs.registry import registered
from ..errors import ConfigError
from . import scaffold

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def init(
    name: Annotated[str, typer.Argument(help="Name of the environment: my-env.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder to write to; ./NAME unless you say otherwise.")
    ] = None,
) -> None:
    """Write a new environment: a package with its entry point, a test, a run file and a README."""
    module = module_for(name)
    folder = folder or Path(name)
    files = files_of(name, module)
    write_all(folder, files)
    typer.echo(f"{folder}: {', '.join(files)}")
    typer.echo(f"Next: cd {folder} && python -m pytest")


def module_for(name: str) -> str:
    """The module of an environment of this name; refuses names that would not work or would hide one."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be the name of an environment: use small letters, digits and single "
            "hyphens, and begin with a letter, as in 'my-env'"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module):
        raise ConfigError(f"'{name}' is a word of Python's own; choose another, as in '{name}-env'")
    if name in registered():
        raise ConfigError(
            f"there is an environment '{name}' already ('rollway envs'); choose another name"
        )
    if find_spec(module) is not None:
        raise ConfigError(
            f"a module '{module}' is installed already, and the new one would hide it; choose another "
            f"name, as in '{name}-env'"
        )
    return module


def files_of(name: str, module: str) -> dict[str, str]:
    """Text by path."""
    words = {"name": name, "module": module, "title": name.title().replace("-", "")}
    texts = {
        "pyproject.toml": scaffold.PYPROJECT,
        f"{module}.py": scaffold.MODULE,
        f"tests/test_{module}.py": scaffold.TEST,
        "run.toml": scaffold.RUN,
        "README.md": scaffold.README,
    }
    return {path: Template(text).substitute(words) for path, text in texts.items()}


def write_all(folder: Path, files: dict[str, str]) -> None:
    """All files, or none: nothing that exists is touched."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose a folder with --dir")
    if taken := [path for path in files if (folder / path).exists()]:
        raise ConfigError(f"{folder / taken[0]} exists; choose another folder with --dir")
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("x") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from None
