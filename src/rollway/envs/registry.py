"""Finds environments by name, module or file."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import EnvironmentNotFound, did_you_mean
from ..loop.lanes.user_files import import_file
from .environment import Environment, check

ENTRY_POINTS = "rollway.environments"


def registered() -> dict[str, EntryPoint]:
    """Environments that installed packages offer, by name."""
    return {point.name: point for point in sorted(entry_points(group=ENTRY_POINTS))}


def load_environment(id: str, /, **args: Any) -> Environment:
    """The environment `id`: a registered name, `package.module`, or `path/to/file.py`."""
    factory = _find(id)
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        raise EnvironmentNotFound(f"environment '{id}' does not take these args: {error}") from None
    return check(factory(**args), f"environment '{id}'")


def check_exists(id: str) -> None:
    """Raise unless there is an environment `id`. None of its code is run."""
    points = registered()
    if id in points:
        return
    if id.endswith(".py"):
        if not Path(id).is_file():
            raise EnvironmentNotFound(f"no environment file at {Path(id).resolve()}")
    elif not _exists(_module_name(id)):
        hint = did_you_mean(id, points)
        raise EnvironmentNotFound(f"no environment '{id}'{hint} ('rollway envs' lists all)")


def _find(id: str) -> Callable[..., Any]:
    check_exists(id)
    if point := registered().get(id):
        factory: Callable[..., Any] = point.load()
        return factory
    if id.endswith(".py"):
        return _factory(import_file(Path(id).resolve()), id)
    return _factory(importlib.import_module(_module_name(id)), id)


def _module_name(id: str) -> str:
    return id.replace("-", "_")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _factory(module: ModuleType, id: str) -> Callable[..., Any]:
    """The module's `load_environment`, or its only Environment class."""
    if hasattr(module, "load_environment"):
        factory: Callable[..., Any] = module.load_environment
        return factory
    classes = [
        member for member in vars(module).values()
        if inspect.isclass(member) and issubclass(member, Environment)
        and member.__module__ == module.__name__
    ]  # fmt: skip
    if len(classes) != 1:
        raise EnvironmentNotFound(
            f"environment '{id}' has no load_environment() and {len(classes)} Environment classes"
        )
    return classes[0]
