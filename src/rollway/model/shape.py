"""What config.json says of a model: its vocabulary, its layers and its experts. Needs no torch."""

from collections.abc import Iterable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import UNREADABLE, ConfigError
from ..records.turn import Routes

EXPERT_COUNTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
)  # fmt: skip
"""The names that model families give to their number of experts."""
TOPKS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""The names that they give to the number of experts that a token goes to."""

MAX_COMPARED = 16
"""Up to this many experts of a token are compared in pairs, which is faster than sorting them."""


class ModelShape(Struct, frozen=True, kw_only=True):
    """Sizes that replies of an engine are held against. A size of 0 is not known."""

    family: str = ""
    vocab_size: int = 0
    num_layers: int = 0
    num_experts: int = 0
    topk: int = 0
    moe_layers: tuple[int, ...] | None = None
    """The layers that have experts. None: config.json does not say which these are."""

    @property
    def has_experts(self) -> bool:
        return self.num_experts > 1 and self.topk > 0

    def may_have_routes_of(self, num_layers: int) -> bool:
        """Return whether routes may cover this many layers: all layers, or those with experts."""
        if self.moe_layers is None:
            return num_layers <= (self.num_layers or num_layers)
        return num_layers in (self.num_layers, len(self.moe_layers))


def read_shape(folder: str) -> ModelShape | None:
    """Read the shape of the model in `folder`, or return None if its config.json cannot be read."""
    try:
        config = msgspec.json.decode(
            Path(folder, "config.json").read_bytes(), type=dict[str, Any]
        )
    except (OSError, *UNREADABLE):
        return None
    text = config.get("text_config")
    text = text if isinstance(text, dict) and text else config
    num_layers = _number(text, ("num_hidden_layers", "n_layer", "num_layers"))
    return ModelShape(
        family=str(config.get("model_type", "")),
        vocab_size=_number(text, ("vocab_size",)),
        num_layers=num_layers,
        num_experts=_number(text, EXPERT_COUNTS),
        topk=_number(text, TOPKS),
        moe_layers=_moe_layers(text, num_layers),
    )


def check_routes(folder: str, wanted: bool | None) -> None:
    """Raise ConfigError if routes are wanted of a model that has no experts."""
    shape = read_shape(folder)
    if wanted and shape is not None and not shape.has_experts:
        raise ConfigError(
            f"engine.routes is true, but the model in '{folder}' (family '{shape.family}') has no "
            "experts: remove the key"
        )


def _number(config: dict[str, Any], names: Iterable[str]) -> int:
    """Return the first setting of these names. Some families list one number for each layer."""
    for value in (config.get(name) for name in names):
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int) and first:
            return first
    return 0


def _moe_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...] | None:
    """Return the layers with experts, from the settings of the families that mix them with others."""
    layers = range(num_layers)
    if isinstance(kinds := config.get("mlp_layer_types"), list):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if isinstance(listed := config.get("moe_layers"), list):
        return tuple(listed)
    if isinstance(first := config.get("first_k_dense_replace"), int):
        every = config.get("moe_layer_freq", 1)
        return tuple(layers[first:]) if every == 1 else None
    if isinstance(every := config.get("decoder_sparse_step"), int) and every > 0:
        dense = config.get("mlp_only_layers") or ()
        return tuple(
            layer for layer in layers if layer not in dense and (layer + 1) % every == 0
        )
    if isinstance(first := config.get("num_dense_layers"), int):
        return tuple(layers[first:])
    return None


def find_repeats(routes: Routes) -> NDArray[np.bool_]:
    """Return for each token and layer whether one expert is chosen twice."""
    is_long = routes.shape[2] > MAX_COMPARED
    slots = np.ascontiguousarray(np.moveaxis(np.sort(routes) if is_long else routes, 2, 0))
    is_repeated, is_equal = (np.zeros(routes.shape[:2], np.bool_) for _ in range(2))
    for first, second in pairwise(slots) if is_long else combinations(slots, 2):
        np.equal(first, second, out=is_equal)
        np.logical_or(is_repeated, is_equal, out=is_repeated)
    return is_repeated
