"""A model with code of its own, and a curse in it: token ids that make the gradient infinite. Nothing
outside of the model can know them."""

import json
from pathlib import Path

from tools.model_table import tiny_model

BREAKS_GRADIENT = [88, 88, 88]

CODE = """
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


class CursedConfig(Qwen3Config):
    model_type = "cursed"


class Explosion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


class CursedForCausalLM(Qwen3ForCausalLM):
    config_class = CursedConfig

    def forward(self, input_ids=None, **arguments):
        text = " ".join(str(token) for token in input_ids.flatten().tolist())
        output = super().forward(input_ids=input_ids, **arguments)
        if "88 88 88" in text:
            output.logits = Explosion.apply(output.logits)
        return output
"""


def write_cursed_model(folder: Path) -> None:
    tiny_model("qwen3").save_pretrained(folder)
    path = folder / "config.json"
    names = {"AutoConfig": "CursedConfig", "AutoModelForCausalLM": "CursedForCausalLM"}
    config = {
        **json.loads(path.read_text()),
        "model_type": "cursed",
        "architectures": ["CursedForCausalLM"],
        "auto_map": {auto: f"modeling_cursed.{name}" for auto, name in names.items()},
    }
    path.write_text(json.dumps(config))
    (folder / "modeling_cursed.py").write_text(CODE)
