"""`rollway init`: writes a new environment as a package, with tests that pass."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

from typer import Argument, Option, echo

from ..envs.registry import registered
from ..errors import ConfigError
from . import scaffold

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def init(
    name: Annotated[str, Argument(help="Name of the environment, such as my-env.")],
    folder: Annotated[
        Path | None, Option("--dir", help="The folder to write; default: ./NAME.")
    ] = None,
) -> None:
    """Write a new environment: a package with its entry point, tests, a run file and a README."""
    module = module_for(name)
    folder = folder or Path(name)
    files = files_of(name, module)
    write_all(folder, files)
    echo(f"{folder}: {', '.join(files)}")
    echo(f"Next: cd {folder} && python -m pytest")


def module_for(name: str) -> str:
    """Return the module's name; refuse names that cannot work or would hide another module."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be the name of an environment: use lowercase letters, digits and single "
            "hyphens, and begin with a letter, as in 'my-env'"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module):
        raise ConfigError(
            f"'{name}' is a keyword of Python; choose another name, as in '{name}-env'"
        )
    if name in registered():
        known = f"an environment '{name}' exists already (see 'rollway envs')"
        raise ConfigError(f"{known}; choose another name")
    if find_spec(module) is not None:
        raise ConfigError(
            f"a module '{module}' is installed already, and the new one would hide it; choose another "
            f"name, as in '{name}-env'"
        )
    return module


def files_of(name: str, module: str) -> dict[str, str]:
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
    """Write all files, or none if one of them exists."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose a folder with --dir")
    if taken := [path for path in files if (folder / path).exists()]:
        raise ConfigError(f"{folder / taken[0]} exists; choose another folder with --dir")
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from None
