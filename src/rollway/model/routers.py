"""The routers of a Mixture-of-Experts: watch which experts they choose, or make them choose.

A router's forward gives `(logits, scores, indices)`, one line per token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ModelError

WITHOUT = "set trainer.replay_routes=false to train without"
ROUTER_SUFFIX = "topkrouter"
TOLERANCE = 1e-4


def find_routers(model: Any) -> list[torch.nn.Module]:
    """The model's routers in the order of their layers; empty for a model without experts."""
    return [one for one in model.modules() if type(one).__name__.lower().endswith(ROUTER_SUFFIX)]


def num_experts(model: Any) -> int:
    config = model.config
    return int(getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0) or 0)


@contextmanager
def capture(routers: list[torch.nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collects each router's choice `[tokens, topk]` while the block runs, in layer order."""
    chosen: list[torch.Tensor] = []
    hooks = [one.register_forward_hook(lambda *call: chosen.append(call[2][2])) for one in routers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replay(routers: list[torch.nn.Module], routes: torch.Tensor) -> Iterator[None]:
    """Makes the routers choose `routes` `[tokens, layers, topk]`; scores keep their gradient."""
    hooks = [
        one.register_forward_hook(_chooser(routes[:, layer].long())) for layer, one in enumerate(routers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_replay(model: Any) -> None:
    """Refuse a model whose routers score otherwise than `replay` does: it would train another model."""
    outputs: list[tuple[Any, Any]] = []
    routers = find_routers(model)
    hooks = [
        one.register_forward_hook(lambda *call: outputs.append((call[0], call[2]))) for one in routers
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(8, device=model.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for router, output in outputs:
        if not isinstance(output, tuple) or len(output) != 3:
            raise ModelError(f"cannot replay routes in {type(router).__name__}; {WITHOUT}")
        _, scores, _ = _chooser(output[2])(router, None, output)
        if scores.shape != output[1].shape or (scores - output[1]).abs().max() > TOLERANCE:
            raise ModelError(f"{type(router).__name__} does not score by softmax; {WITHOUT}")


def _chooser(indices: torch.Tensor) -> Any:
    def choose(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits = output[0]
        scores = torch.softmax(logits, dtype=torch.float, dim=-1).gather(-1, indices)
        if getattr(router, "norm_topk_prob", True):
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return logits, scores.to(logits.dtype), indices

    return choose
