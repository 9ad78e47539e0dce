"""The model that the loopback engine pretends to serve: a tokenizer, and the shape of its routes."""

import json
from pathlib import Path

from loopback.engine import EngineSpec


def write_model(folder: Path, engine: EngineSpec) -> None:
    """Write what workers read of a model, so that they hold replies against it."""
    from rollway.model.tiny import write_tokenizer

    config = {
        "model_type": "loopback",
        "vocab_size": write_tokenizer(folder),
        "num_hidden_layers": engine.layers,
        "num_experts": 256,
        "num_experts_per_tok": engine.slots,
    }
    (folder / "config.json").write_text(json.dumps(config))
