"""`rollway envs`: which environments are installed."""

import typer

from ..envs.registry import registered


def envs() -> None:
    """List the environments that can be named in a run file."""
    for name, point in registered().items():
        typer.echo(f"{name:24} {point.value}")
    typer.echo("A module (my_package.my_env) or a file (path/to/env.py) works too.")
