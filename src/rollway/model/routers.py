"""Records which experts the routers of a Mixture-of-Experts choose, or makes them choose given ones.

A router's forward pass returns `(logits, scores, indices)`, each with one entry per token.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError

NO_REPLAY_HINT = "set trainer.replay_routes = false to train without replaying routes"
ROUTER_SUFFIX = "topkrouter"
TOLERANCE = 1e-4


def find_routers(model: Any) -> list[torch.nn.Module]:
    """Return the model's routers in the order of their layers. A model without experts has none."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.lower().endswith(ROUTER_SUFFIX)
    ]


def num_experts(model: Any) -> int:
    config = model.config
    count = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
    return int(count or 0)


@contextmanager
def _forward_hooks(routers: list[torch.nn.Module], hooks: Iterable[Any]) -> Iterator[None]:
    """Register one hook at each router while the block runs."""
    with ExitStack() as stack:
        for router, hook in zip(routers, hooks, strict=True):
            stack.callback(router.register_forward_hook(hook).remove)
        yield


@contextmanager
def capture(routers: list[torch.nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the choice `[tokens, topk]` of each router while the block runs, in layer order."""
    chosen: list[Tensor] = []

    def note(router: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        chosen.append(output[2])

    with _forward_hooks(routers, [note] * len(routers)):
        yield chosen


@contextmanager
def replay(routers: list[torch.nn.Module], routes: Tensor) -> Iterator[None]:
    """Make the routers choose `routes` `[tokens, layers, topk]`. The scores keep their gradient."""
    choosers = [_make_chooser(choice.long()) for choice in routes.unbind(1)]
    with _forward_hooks(routers, choosers):
        yield


def check_replay(model: Any) -> None:
    """Raise ModelError if the model's routers compute scores in another way than `replay` does: with
    replayed routes the trainer would compute another model than the engine."""
    outputs: list[tuple[Any, Any]] = []

    def note(router: Any, inputs: Any, output: Any) -> None:
        outputs.append((router, output))

    routers = find_routers(model)
    with torch.no_grad(), _forward_hooks(routers, [note] * len(routers)):
        model(input_ids=torch.arange(8, device=model.device)[None], use_cache=False)
    for router, output in outputs:
        name = type(router).__name__
        if not isinstance(output, tuple) or len(output) != 3:
            raise ModelError(f"routes cannot be replayed in {name}: {NO_REPLAY_HINT}")
        _, expected, indices = output
        _, scores, _ = _make_chooser(indices)(router, None, output)
        if scores.shape != expected.shape or (scores - expected).abs().max() > TOLERANCE:
            raise ModelError(f"{name} does not score by softmax: {NO_REPLAY_HINT}")


def _make_chooser(indices: Tensor) -> Any:
    """Return a forward hook that makes a router choose `indices`."""

    def choose(router: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits = output[0]
        scores = torch.softmax(logits, dtype=torch.float, dim=-1).gather(-1, indices)
        if getattr(router, "norm_topk_prob", True):
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return logits, scores.to(logits.dtype), indices

    return choose
