"""`rollway envs`: which environments are installed."""

import ast
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import typer

from ..envs.registry import registered


def envs() -> None:
    """List the environments that can be named in a run file: built-in and installed ones."""
    points = registered()
    width = max(map(len, points), default=0)
    for name, point in points.items():
        typer.echo(f"{name:{width}}  {description(name, point)}")
    typer.echo("A module (my_package.my_env) or a file (path/to/env.py) works too.")


def description(name: str, point: EntryPoint) -> str:
    """The first line of its module's docstring, read but not run; else what its package says."""
    said = _docstring(point.module).partition("\n")[0].strip().removeprefix(f"{name}:").strip()
    if said or point.dist is None:
        return said or point.value
    return str(point.dist.metadata["Summary"] or point.value)


def _docstring(module: str) -> str:
    try:
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            return f"cannot be loaded: there is no module {module}"
        return ast.get_docstring(ast.parse(Path(spec.origin).read_bytes())) or ""
    except Exception as error:  # importing its parent package runs code of others
        return f"cannot be loaded: {type(error).__name__}: {error}"
