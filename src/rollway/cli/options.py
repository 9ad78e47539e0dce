"""Options that say what a run file would say otherwise."""

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

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
