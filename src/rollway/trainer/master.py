"""The weights that the optimizer updates, always in float32."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from ..model.load import float32_names


class MasterWeights:
    """Float32 weights of a model that computes in `dtype`. In float32 they are the model's own. If not,
    the model has a rounded copy of them, and its gradients are summed here as they arise."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """`model` is in float32, and computes in `dtype` afterwards. Parameters that its family never
        rounds stay as they are, and so do buffers."""
        self.named: dict[str, Parameter] = {}
        self._copies: list[tuple[Parameter, Parameter]] = []
        kept = float32_names(model)
        for name, weight in model.named_parameters():
            master = weight
            if dtype != torch.float32 and name not in kept:
                master = Parameter(weight.detach(), requires_grad=weight.requires_grad)
                weight.data = weight.data.to(dtype)
                self._copies.append((weight, master))
                if weight.requires_grad:
                    weight.register_post_accumulate_grad_hook(_add_to(master))
            self.named[name] = master

    @torch.no_grad()
    def copy_to_model(self) -> None:
        for weight, master in self._copies:
            weight.copy_(master)


def _add_to(master: Parameter) -> Callable[[Tensor], None]:
    """Return a hook that moves a weight's gradient to its master."""

    def add(weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient

    return add
