"""Options that say what a run file would say otherwise."""

from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..config.sections import MetricsConfig
from ..errors import UNREADABLE, ConfigError

S = TypeVar("S", bound=Struct)


def json_object(option: str, text: str) -> dict[str, Any]:
    """What an option holds that takes a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE as error:
        raise ConfigError(f"{option} {text!r} is no JSON object: {error}") from None


def checked(config: S, **called: str) -> S:
    """The same section, refused where a run file's would be, in the words of the command line. `called`
    are options that have another name than their key."""
    try:
        return msgspec.convert(msgspec.to_builtins(config), type(config))
    except msgspec.ValidationError as error:
        told = str(error).replace(" - at `$.", " - for `--").replace("_", "-")
        for key, option in called.items():
            told = told.replace(f"`--{key}", f"`--{option}")
        raise ConfigError(told) from None


def need_torch(what: str) -> None:
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ConfigError(f"{what} needs torch and transformers: pip install 'rollway[local]'")


def need_sinks(config: MetricsConfig) -> None:
    if config.wandb_project:
        _need("wandb", f"'metrics.wandb_project' = {config.wandb_project!r}")
    if config.tensorboard:
        _need("tensorboard", "'metrics.tensorboard' = true")


def _need(package: str, what: str) -> None:
    found = find_spec(package)
    if found is None or found.origin is None:  # a folder of that name is no package
        raise ConfigError(f"{what} needs the package {package}: pip install 'rollway[{package}]'")
