"""Checks and names a model folder without loading it."""

import json
import re
from pathlib import Path
from typing import Any

from ..errors import ModelError


def check_folder(
    folder: str, *, trusts_code: bool = True, needs_weights: bool = True
) -> None:
    """Raise ModelError if this cannot be a model folder, if it needs code that may not run, or if its
    weights are needed and cannot be trained."""
    path = Path(folder, "config.json")
    if not path.parent.is_dir():
        raise ModelError(f"no model folder '{folder}' (model.path)")
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"cannot read model '{folder}': {error}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{path} does not name the model's family (model_type)")
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
