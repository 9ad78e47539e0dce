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
ZERO_EXPERTS = ("zero_expert_num",)
"""Experts that do nothing, and are counted after the others."""
TOPKS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "num_selected_experts",
    "top_k_experts",
)
"""The names that they give to the number of experts that a token goes to."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
"""The names that they give to the longest text that their positions are made for."""
CHANGING_ROPES = ("longrope", "su", "dynamic")
"""Kinds of rotary positions that are other ones in texts above some length."""

MIN_ZEROS = 64
"""A router that chooses one expert may choose the first for this many tokens and layers, but no more."""
ALL_ZERO = "are all zero: the engine does not record them (vLLM on CPU needs --enforce-eager)"
MAX_SORTED = 16_384
"""Up to this number of choices the calls of numpy cost more than what they do, so few are made."""
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
    max_context: int = 0
    """The longest text in which the model computes each position as in a shorter text."""
    has_tied_head: bool = False
    """The output layer has the weights of the embeddings, as config.json says."""

    @property
    def has_experts(self) -> bool:
        return self.num_experts > 1

    def why_not(self, routes: Routes, highest: int) -> str:
        """Return what of `routes` does not fit the model; empty if all does. `highest` is the largest
        expert among them. They cover all layers, or those with experts."""
        _, num_layers, topk = routes.shape
        known = {self.num_layers, len(self.moe_layers or ())} - {0}
        fits = num_layers in known or self.moe_layers is None
        fits = fits and num_layers <= (self.num_layers or num_layers)
        if not fits or topk != (self.topk or topk):
            wanted = " or ".join(str(count) for count in sorted(known))
            return (
                f"have {num_layers} layers × {topk} experts, but the model ({self.family}) has "
                f"{wanted} × {self.topk}"
            )
        if highest >= self.num_experts:
            return f"name expert {highest}, but the model has {self.num_experts}"
        if highest == 0 and (topk > 1 or routes.size >= MIN_ZEROS):
            return ALL_ZERO
        return ""

    def count_repeats(self, routes: Routes) -> int:
        """Return how many tokens go to one expert twice, in layers that have experts."""
        if routes.shape[2] == 1:
            return 0
        is_repeated = find_repeats(routes)
        if not is_repeated.any():
            return 0
        if self.moe_layers is None:
            # layers without experts may be among them, with zeros for every token
            is_repeated = is_repeated[:, routes.any(axis=(0, 2))]
        elif routes.shape[1] == self.num_layers:
            is_repeated = is_repeated[:, list(self.moe_layers)]
        return int(is_repeated.any(axis=1).sum())


def read_shape(folder: str) -> ModelShape | None:
    """Read the shape of the model in `folder`, or return None if its config.json cannot be read."""
    try:
        config = msgspec.json.decode(
            Path(folder, "config.json").read_bytes(), type=dict[str, Any]
        )
    except (OSError, *UNREADABLE):
        return None
    return parse_shape(config)


def parse_shape(config: dict[str, Any]) -> ModelShape:
    """Find the shape in the settings of config.json, under the names of many families."""
    text = config
    for part in ("thinker_config", "llm_config", "text_config"):
        if isinstance(text.get(part), dict):
            text = text[part] or text
    if isinstance(text.get("ffn_config"), dict):
        text = {**text, **text["ffn_config"]}
    num_layers = _number(text, ("num_hidden_layers", "n_layer", "num_layers"))
    return ModelShape(
        family=str(config.get("model_type", "")),
        vocab_size=_number(text, ("vocab_size",)),
        num_layers=num_layers,
        num_experts=_number(text, EXPERT_COUNTS) + _number(text, ZERO_EXPERTS),
        topk=_number(text, TOPKS),
        moe_layers=_moe_layers(text, num_layers),
        max_context=_max_context(text),
        has_tied_head=config.get("tie_word_embeddings") is True,
    )


def check_routes(folder: str, wanted: bool | None) -> None:
    """Raise ConfigError if routes are wanted of a model that has no experts."""
    shape = read_shape(folder)
    if wanted and shape is not None and not shape.has_experts:
        raise ConfigError(
            f"engine.routes is true, but the model in '{folder}' (family '{shape.family}') has no "
            "experts: remove the key"
        )


def check_room(folder: str, max_tokens: int) -> None:
    """Raise ConfigError if a reply alone would be longer than a text that the model takes."""
    shape = read_shape(folder)
    if shape and 0 < shape.max_context <= max_tokens:
        raise ConfigError(
            f"sampling.max_tokens is {max_tokens}, but the model in '{folder}' (family "
            f"'{shape.family}') takes texts of up to {shape.max_context} tokens: set it lower"
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


def _max_context(config: dict[str, Any]) -> int:
    """Return how long a text may be; 0 if the settings do not say."""
    longest = _number(config, POSITIONS)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        name = "original_max_position_embeddings"
        original = _number(part, (name,)) or _number(config, (name,)) or longest
        if part.get("rope_type", part.get("type")) in CHANGING_ROPES:
            return original
        longest = max(longest, int(original * (part.get("factor") or 1)))
    return longest


def find_repeats(routes: Routes) -> NDArray[np.bool_]:
    """Return for each token and layer whether one expert is chosen twice."""
    if routes.size <= MAX_SORTED:
        ordered = np.sort(routes)
        is_same: NDArray[np.bool_] = ordered[:, :, 1:] == ordered[:, :, :-1]
        found: NDArray[np.bool_] = np.logical_or.reduce(is_same, axis=2)
        return found
    is_long = routes.shape[2] > MAX_COMPARED
    slots = np.ascontiguousarray(np.moveaxis(np.sort(routes) if is_long else routes, 2, 0))
    is_repeated, is_equal = (np.zeros(routes.shape[:2], np.bool_) for _ in range(2))
    for first, second in pairwise(slots) if is_long else combinations(slots, 2):
        np.equal(first, second, out=is_equal)
        np.logical_or(is_repeated, is_equal, out=is_repeated)
    return is_repeated
