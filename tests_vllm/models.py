"""Tiny models with random weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollway.model.tiny import TinyShape, tiny_model, write_tokenizer

CONTEXT = 2048


def write_model(folder: Path, *, experts: int = 8, seed: int = 0, **changes: Any) -> Path:
    """Write a Qwen3, with `experts` in each layer or none, and with changes of its config."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    size = write_tokenizer(folder)
    model = tiny_model(TinyShape(num_experts=experts), size, size - 7, CONTEXT)
    if changes:
        config = model.config
        for key, value in changes.items():
            setattr(config, key, value)
        torch.manual_seed(seed)
        model = type(model)(config)
    model.save_pretrained(folder)
    return folder


def copy_without(source: Path, folder: Path, tensor: str) -> Path:
    """Copy a checkpoint, but leave out one tensor."""
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_adapter(folder: Path, base: Path) -> Path:
    """Write a LoRA adapter of rank 4 for the query projections of a dense model."""
    weights = load_file(base / "model.safetensors")
    tensors, torch_seed = {}, torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            place = f"base_model.model.{name.removesuffix('.weight')}"
            out, into = weight.shape
            tensors[f"{place}.lora_A.weight"] = torch.randn(4, into, generator=torch_seed) / 8
            tensors[f"{place}.lora_B.weight"] = torch.randn(out, 4, generator=torch_seed) / 8
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", '
        f'"task_type": "CAUSAL_LM", "base_model_name_or_path": "{base}"}}'
    )
    return folder
