"""A model as transformers computes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


class Reference:
    """The model as transformers computes it."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @contextmanager
    def _chosen(self) -> Iterator[list[Any]]:
        """Collect the experts that each layer chooses."""
        chosen: list[Any] = []
        gates = [layer.mlp.gate for layer in self.model.model.layers]
        hooks = [
            gate.register_forward_hook(lambda _gate, _in, out: chosen.append(out[2]))
            for gate in gates
        ]
        yield chosen
        for hook in hooks:
            hook.remove()

    @torch.no_grad()
    def score(self, ids: list[int]) -> tuple[Any, Any]:
        """Return the logprobs of all tokens but the first, and the experts `[tokens, layers, topk]`."""
        with self._chosen() as chosen:
            logits = self.model(torch.tensor([ids])).logits[0]
        logprobs = torch.log_softmax(logits[:-1], -1)
        drawn = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        return drawn, np.stack([layer.numpy() for layer in chosen], axis=1)
