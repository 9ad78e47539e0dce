"""The settings that a warmed-up model was built with, and the messages of the warm-up's process.

This module imports nothing heavy, so that the command line can use it.
"""

import json
from pathlib import Path

import msgspec
from msgspec import Struct

from ..config.specs import WarmupSpec
from ..errors import ConfigError

RECIPE = "warmup.json"
"""The file beside the weights that holds the recipe."""


class WarmupProgress(Struct, frozen=True, tag="progress"):
    step: int
    loss: float
    solve_rate: float


class WarmupEnded(Struct, frozen=True, tag="ended"):
    """The warm-up has ended; `error` is empty if the model is built."""

    error: str = ""


WarmupMessage = WarmupProgress | WarmupEnded


def recipe(spec: WarmupSpec) -> bytes:
    """Return the settings that decide the weights. The same recipe gives the same model."""
    settings = {
        "warmup": spec.warmup,
        "env": spec.env.id,
        "args": spec.env.args,
        "renderer": spec.model.renderer,
        "template": spec.model.template,
        "max_context": spec.max_context,
        "seed": spec.seed,
    }
    return msgspec.json.encode(settings, order="deterministic")


def is_built(spec: WarmupSpec) -> bool:
    """Return whether the model exists. Raise if it was built in another way or with other settings."""
    folder = Path(spec.model.path)
    if not folder.exists():
        return False
    try:
        built = (folder / RECIPE).read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"model.path '{folder}' exists but was not built by a warm-up; remove [warmup] to use it, "
            "or choose another path"
        ) from None
    if json.loads(built) != json.loads(recipe(spec)):
        raise ConfigError(
            f"model.path '{folder}' was built with other warm-up settings; delete the folder to build "
            "it again, or choose another path"
        )
    return True
