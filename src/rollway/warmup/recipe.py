"""What a warmed-up model was built from, and what its warm-up says. Imports nothing heavy."""

import json
from pathlib import Path

import msgspec
from msgspec import Struct

from ..config.specs import WarmupSpec
from ..errors import ConfigError

RECIPE = "warmup.json"
"""Kept beside the weights."""


class WarmupProgress(Struct, frozen=True, tag="progress"):
    """How far the warm-up is."""

    step: int
    loss: float
    solve_rate: float


class WarmupEnded(Struct, frozen=True, tag="ended"):
    """It is done; `error` says why it could not be."""

    error: str = ""


WarmupMessage = WarmupProgress | WarmupEnded


def recipe(part: WarmupSpec) -> bytes:
    """Two configs with the same recipe give the same model."""
    kept = {
        "warmup": part.warmup,
        "env": part.env.id,
        "args": part.env.args,
        "renderer": part.model.renderer,
        "template": part.model.template,
        "max_context": part.max_context,
        "seed": part.seed,
    }
    return msgspec.json.encode(kept, order="deterministic")


def is_built(part: WarmupSpec) -> bool:
    """Whether the model is there; refuses one that was built otherwise."""
    folder = Path(part.model.path)
    if not folder.exists():
        return False
    try:
        built = (folder / RECIPE).read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"model.path '{folder}' exists but was not built by a warm-up; remove [warmup] to use it, "
            "or choose another path"
        ) from None
    if json.loads(built) != json.loads(recipe(part)):
        raise ConfigError(
            f"model.path '{folder}' was built with other warm-up settings; delete the folder to build "
            "it anew, or choose another path"
        )
    return True
