"""`rollway envs`: lists the environments that are installed."""

import ast
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

from typer import echo

from ..envs.registry import registered


def envs() -> None:
    """List the environments that a run file can name: built-in ones and those of installed packages."""
    points = registered()
    width = max(map(len, points), default=0)
    for name, point in points.items():
        echo(f"{name:{width}}  {describe(name, point)}")
    echo("You can also name a module (my_package.my_env) or a file (path/to/env.py).")


def describe(name: str, point: EntryPoint) -> str:
    """Return the first line of the module's docstring, or else its package's summary. No code is run."""
    first_line = _docstring(point.module).partition("\n")[0]
    text = first_line.strip().removeprefix(f"{name}:").strip()
    if text or point.dist is None:
        return text or point.value
    return str(point.dist.metadata["Summary"] or point.value)


def _docstring(module: str) -> str:
    try:
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            return f"cannot be loaded: no module {module}"
        return ast.get_docstring(ast.parse(Path(spec.origin).read_bytes())) or ""
    except Exception as error:  # importing its parent package runs other people's code
        return f"cannot be loaded: {type(error).__name__}: {error}"
