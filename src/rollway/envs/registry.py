"""Finds environments by name, module or file."""

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import EnvironmentInvalid, EnvironmentNotFound, did_you_mean
from ..loop.lanes.user_files import import_file
from .environment import Environment, check

ENTRY_POINTS = "rollway.environments"


def registered() -> dict[str, EntryPoint]:
    """Return the environments that installed packages offer, by name."""
    return {point.name: point for point in sorted(entry_points(group=ENTRY_POINTS))}


def load_environment(env_id: str, /, **args: Any) -> Environment:
    """Build the environment `env_id`: a registered name, `package.module`, or `path/to/file.py`."""
    return build_environment(env_id, args)


def build_environment(
    env_id: str, args: dict[str, Any], source: bytes | None = None
) -> Environment:
    """Build an environment. `source` is the text of its file, if that may have been edited since."""
    factory, origin = _find(env_id, source), f"environment '{env_id}'"
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        raise EnvironmentInvalid(f"{origin} does not take these args: {error}") from None
    return check(factory(**args), origin)


def check_exists(env_id: str) -> None:
    """Raise EnvironmentNotFound unless there is an environment `env_id`. Its code is not run."""
    points = registered()
    if env_id in points:
        return
    if env_id.endswith(".py"):
        if not Path(env_id).is_file():
            raise EnvironmentNotFound(f"no environment file at {Path(env_id).resolve()}")
    elif not _exists(_module_name(env_id)):
        hint = did_you_mean(env_id, points)
        raise EnvironmentNotFound(
            f"no environment '{env_id}'{hint} ('rollway envs' lists all)"
        )


def _find(env_id: str, source: bytes | None) -> Callable[..., Any]:
    if source is None:
        check_exists(env_id)
    if point := registered().get(env_id):
        factory: Callable[..., Any] = point.load()
        return factory
    if env_id.endswith(".py"):
        return _factory(import_file(Path(env_id).resolve(), source), env_id)
    return _factory(import_module(_module_name(env_id)), env_id)


def read_source(env_id: str) -> bytes | None:
    """Return the text of an environment's file; None for other environments. Blocks."""
    path = Path(env_id)
    return path.read_bytes() if env_id.endswith(".py") and path.is_file() else None


def _module_name(env_id: str) -> str:
    return env_id.replace("-", "_")


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _factory(module: ModuleType, env_id: str) -> Callable[..., Any]:
    """Return the module's `load_environment`, or its only Environment class."""
    if hasattr(module, "load_environment"):
        factory: Callable[..., Any] = module.load_environment
        return factory
    classes = [kind for kind in vars(module).values() if inspect.isclass(kind)]
    own = [kind for kind in classes if kind.__module__ == module.__name__]
    envs = [kind for kind in own if issubclass(kind, Environment)]
    if len(envs) != 1:
        raise EnvironmentInvalid(
            f"environment '{env_id}' has {len(envs)} Environment classes and no load_environment(); "
            "write a function load_environment() that returns the one to use"
        )
    return envs[0]
