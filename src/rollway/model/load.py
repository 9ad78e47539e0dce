"""Loads models from folders and writes weights. Errors name the folder and the problem."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ..errors import ModelError
from .folder import check_folder

EXPERTS = "grouped_mm"

transformers_logging.disable_progress_bar()


def load_model(folder: str, dtype: str = "float32") -> Any:
    """Load the model in `folder` on the GPU if there is one, else on the CPU."""
    check_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, local_files_only=True, dtype=getattr(torch, dtype),
            attn_implementation="sdpa", experts_implementation=EXPERTS,
        )  # fmt: skip
    except (OSError, ValueError, SafetensorError, RuntimeError) as error:
        text = str(error).strip() or type(error).__name__
        raise ModelError(f"cannot load model '{folder}': {text.splitlines()[0]}") from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def load_weights(model: Any, folder: str) -> None:
    """Copy the weights in `folder` into a model of the same shape, in place."""
    fresh = load_model(folder, str(model.dtype).removeprefix("torch."))
    try:
        model.load_state_dict(fresh.state_dict())
    except RuntimeError as error:
        raise ModelError(f"the weights in '{folder}' do not fit the model: {error}") from None


def save_weights(model: Any, folder: Path) -> None:
    """Write config and weights in the layout of the Hugging Face hub, which every engine can load."""
    model.save_pretrained(folder, safe_serialization=True)
