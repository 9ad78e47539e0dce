"""Checks and names a model folder without loading it."""

import json
import re
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .checkpoint import check_whole, tensor_names

LAYER = re.compile(r"model\.layers\.(\d+)\.")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
INDEX = "model.safetensors.index.json"
"""The file that lists the parts of weights that do not fit into one file."""


def check_folder(
    folder: str, *, trusts_code: bool = True, needs_weights: bool = True
) -> None:
    """Raise ModelError if this cannot be a model folder, if it needs code that may not run, or if its
    weights are needed and cannot be trained."""
    config = read_config(folder)
    if needs_weights and (quantized := config.get("quantization_config")):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ModelError(
            f"the weights in '{folder}' are quantized ({method}): the embedded engine and trainer need "
            "the same model in bfloat16 or float32"
        )
    if not trusts_code and needs_own_code(config):
        raise ModelError(
            f"the model in '{folder}' (family '{config['model_type']}') runs Python code that comes "
            "with it: read that code, and set model.trust_remote_code = true to allow it"
        )
    if needs_weights:
        check_weights(folder)


def read_config(folder: str) -> dict[str, Any]:
    """Return the settings of config.json, which must name the model's family."""
    path = Path(folder, "config.json")
    if not path.parent.is_dir():
        raise ModelError(f"no model folder '{folder}' (model.path)")
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"'{folder}' is not a model folder: it has no config.json (model.path)"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} does not name the model's family (model_type)")
    return config


def check_weights(folder: str) -> int:
    """Return how many bytes the weights have. Raise ModelError if some of them, or all, are missing."""
    files = [path for kind in WEIGHTS for path in Path(folder).glob(kind)]
    if not files:
        raise ModelError(
            f"'{folder}' has no weights (*.safetensors): copy them there, or give the right folder"
        )
    index = Path(folder, INDEX)
    if index.exists():
        try:
            listed = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ModelError(f"{index} does not list weights (weight_map)") from None
        if missing := sorted(listed - {path.name for path in files}):
            raise ModelError(
                f"'{folder}' lacks {len(missing)} of {len(listed)} files of weights that {INDEX} lists, "
                f"such as {missing[0]}: download the model again"
            )
    if empty := [path for path in files if not path.stat().st_size]:
        raise ModelError(f"{empty[0]} is empty: download the model again")
    return sum(path.stat().st_size for path in files)


def check_loadable(folder: str) -> None:
    """Refuse weights that are cut off, or that have more layers than config.json says, of which
    transformers would load only some. Reads headers, no weights."""
    check_whole(Path(folder))
    config = read_config(folder)
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or any(
        "nextn" in key or "mtp" in key for key in config
    ):
        return  # layers that predict further tokens are not counted there
    found = [LAYER.match(name) for name in tensor_names(Path(folder))]
    highest = max((int(match[1]) for match in found if match), default=-1)
    if highest >= num_layers:
        raise ModelError(
            f"config.json in '{folder}' says that the model has {num_layers} layers, but its weights "
            f"have {highest + 1}: they do not belong together (num_hidden_layers)"
        )


def needs_own_code(config: dict[str, Any]) -> bool:
    """Return whether transformers can only load this model with code from its folder. Many models bring
    code that is not needed any more."""
    if "auto_map" not in config:
        return False
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return config["model_type"] not in CONFIG_MAPPING_NAMES


def hub_name_of(folder: str) -> str:
    """Return the name that a model has on the hub; empty unless its folder lies in the hub's cache."""
    found = re.search(r"models--([^/]+)--([^/]+)/snapshots/[^/]+/?$", folder)
    return f"{found[1]}/{found[2]}" if found else ""
