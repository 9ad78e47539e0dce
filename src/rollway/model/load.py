"""Loads models from folders and writes weights. Errors name the folder and the problem."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ..errors import ModelError
from .folder import check_folder

transformers_logging.disable_progress_bar()


def load_model(folder: str, dtype: str = "float32", *, trusts_code: bool = False) -> Any:
    """Load the model in `folder` on the GPU if there is one, else on the CPU. `trusts_code` allows that
    Python code in the folder runs."""
    check_folder(folder, trusts_code=trusts_code)
    options = {"local_files_only": True, "trust_remote_code": trusts_code}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), **options
        )
    except (OSError, ValueError, SafetensorError, RuntimeError, ImportError) as error:
        text = str(error).strip() or type(error).__name__
        raise ModelError(f"cannot load model '{folder}': {text.splitlines()[0]}") from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def load_weights(model: Any, folder: str) -> None:
    """Copy the weights in `folder` into a model of the same shape, in place."""
    fresh = load_model(folder, str(model.dtype).removeprefix("torch."), trusts_code=True)
    try:
        model.load_state_dict(fresh.state_dict())
    except RuntimeError as error:
        raise ModelError(f"the weights in '{folder}' do not fit the model: {error}") from None


def save_weights(
    model: Any,
    folder: Path,
    dtype: str = "float32",
    masters: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config and weights in the layout of the Hugging Face hub, which every engine can load.
    `masters` are more exact values of some weights."""
    rounded, exact = {}, masters or {}
    weights = model.state_dict()
    for name, weight in weights.items():
        # a weight that has two names is written once
        if weight.data_ptr() not in rounded:
            source = exact.get(name, weight)
            is_rounded = weight.is_floating_point() and not stays_float32(model, name)
            target = getattr(torch, dtype) if is_rounded else source.dtype
            rounded[weight.data_ptr()] = source.detach().to(target)
        weights[name] = rounded[weight.data_ptr()]
    model.save_pretrained(folder, state_dict=weights)
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), "dtype": dtype}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def stays_float32(model: Any, name: str) -> bool:
    """Return whether a weight is never rounded: a buffer, or one that its family keeps in float32."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    is_kept = any(re.search(rf"(^|\.){part}(\.|$)", name) for part in kept)
    module, _, last = name.rpartition(".")
    return is_kept or last in model.get_submodule(module)._buffers
