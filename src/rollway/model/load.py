"""Loads models from folders and writes weights. Errors name the folder and the problem."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from ..errors import ModelError
from .folder import check_folder

MAX_REASON = 300
"""Characters of transformers' own words that an error quotes."""

transformers_logging.disable_progress_bar()


def load_model(folder: str, dtype: str = "float32", *, trusts_code: bool = False) -> Any:
    """Load the model in `folder` on the GPU if there is one, else on the CPU. `trusts_code` allows that
    Python code in the folder runs."""
    check_folder(folder, trusts_code=trusts_code)
    options = {"local_files_only": True, "trust_remote_code": trusts_code}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them
            **options,
        )
    except Exception as error:  # config.json and the family's code may be wrong in any way
        text = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"cannot load model '{folder}': {text[:MAX_REASON]}") from None
    _check_tensors(folder, report)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _check_tensors(folder: str, report: dict[str, Any]) -> None:
    """Raise ModelError if the model has tensors that the weights do not have, or not in this shape."""
    for name, found, wanted in report["mismatched_keys"]:
        raise ModelError(
            f"the weights in '{folder}' do not fit its config.json: '{name}' is {list(found)}, and not "
            f"{list(wanted)}"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"the weights in '{folder}' lack {len(missing)} of the model's tensors, such as "
            f"'{missing[0]}'"
        )


def load_weights(model: Any, folder: str, *, trusts_code: bool = False) -> None:
    """Copy the weights in `folder` into a model of the same shape, in place."""
    dtype = str(model.dtype).removeprefix("torch.")
    fresh = load_model(folder, dtype, trusts_code=trusts_code)
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
    weights, kept = model.state_dict(), float32_names(model)
    for name, weight in weights.items():
        # a weight that has two names is written once
        if weight.data_ptr() not in rounded:
            source = exact.get(name, weight)
            is_rounded = weight.is_floating_point() and name not in kept
            target = getattr(torch, dtype) if is_rounded else source.dtype
            rounded[weight.data_ptr()] = source.detach().to(target)
        weights[name] = rounded[weight.data_ptr()]
    with _plain_generation(model):
        model.save_pretrained(folder, state_dict=weights)
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), "dtype": dtype}
    if not model.is_remote_code():
        settings.pop("auto_map", None)  # it names code that is not in this folder
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """Save a model without its defaults for sampling: transformers loads some that it will not save."""
    own = getattr(model, "generation_config", None)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    try:
        yield
    finally:
        model.generation_config = own


@lru_cache(maxsize=2)
def float32_names(model: Any) -> frozenset[str]:
    """Return the names of what is never rounded: buffers, and weights that a family keeps in float32."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept = re.compile("|".join(rf"(^|\.){part}(\.|$)" for part in strict) or r"(?!)")
    with torch.device("meta"):
        rounded = type(model)._from_config(model.config, dtype=torch.bfloat16)
    names = {name for name, _ in model.named_buffers()}
    for name, weight in rounded.named_parameters():
        if weight.dtype == torch.float32 or kept.search(name):
            names.add(name)
    return frozenset(names)
