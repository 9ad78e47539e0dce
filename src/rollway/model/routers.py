"""Records which experts the routers of a Mixture-of-Experts choose, or makes them choose given ones.

Families score experts in their own ways: with softmax or sigmoid, a bias, groups, a scale. But each
router picks its experts with one call of `torch.topk` over all experts. That call alone is recorded or
answered here. What a family computes before and after it stays the family's own code.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from .shape import parse_shape

NO_REPLAY_HINT = "set trainer.replay_routes = false to train without replaying routes"
TOLERANCE = 1e-4
NUM_PROBED = 13
"""Tokens of the pass that looks for routers: a number that is unlikely to be a size of the model."""

Choose = Callable[[Tensor, int], Tensor | None]
"""Gets the scores `[tokens, experts]` and how many to choose. Returns the experts, or None for the
router's own choice."""


class ExpertRouter(NamedTuple):
    """The module of one layer that chooses experts. `num_groups` is 0 unless it chooses groups first."""

    layer: int
    module: Module
    num_experts: int
    topk: int
    num_groups: int


class _TopkMode(TorchFunctionMode):
    """Shows every call of `topk` to `watch`, which may return the answer itself."""

    def __init__(self, watch: Callable[[Tensor, int], Any]) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
            answer = self._watch(scores, k) if scores.ndim == 2 else None
            if answer is not None:
                return answer
        return func(*args, **kwargs)


def find_routers(model: Any) -> list[ExpertRouter]:
    """Return the model's routers in the order of their layers. A model without experts has none.

    One short forward pass shows which modules call `topk` with one row of scores for each token. The
    last such call of a module is its choice of experts, the one before it a choice of groups.
    """
    if not has_experts(model.config):
        return []
    names = {module: name for name, module in model.named_modules()}
    running: list[Module] = []
    calls: dict[Module, list[tuple[int, int]]] = {}

    def watch(scores: Tensor, k: int) -> None:
        if running and len(scores) == NUM_PROBED:
            calls.setdefault(running[-1], []).append((scores.shape[1], int(k)))

    def enter(module: Module, _: Any) -> None:
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    hooks = torch.nn.modules.module
    with ExitStack() as stack:
        stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
        stack.callback(hooks.register_module_forward_hook(leave).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(_TopkMode(watch))
        model(input_ids=_probe_ids(model), use_cache=False)
    routers = [_router(module, names[module], called) for module, called in calls.items()]
    return sorted(routers, key=lambda router: router.layer)


def _probe_ids(model: Any) -> Tensor:
    return torch.arange(NUM_PROBED, device=model.device)[None]


def _router(module: Module, name: str, called: list[tuple[int, int]]) -> ExpertRouter:
    number = re.search(r"\.(\d+)\.", name)
    if number is None:
        raise ModelError(f"the router '{name}' does not belong to a layer: {NO_REPLAY_HINT}")
    (num_experts, topk), groups = called[-1], called[:-1]
    return ExpertRouter(
        int(number[1]), module, num_experts, topk, groups[-1][0] if groups else 0
    )


def has_experts(config: Any) -> bool:
    return parse_shape(config.get_text_config().to_dict()).has_experts


@contextmanager
def _choosing(routers: list[ExpertRouter], choosers: list[Choose]) -> Iterator[None]:
    """Let each chooser answer its router while the block runs."""
    with ExitStack() as stack:
        for router, choose in zip(routers, choosers, strict=True):
            enter, leave = _hooks(_TopkMode(_answering(router, choose)))
            module = router.module
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _hooks(mode: _TopkMode) -> tuple[Any, Any]:
    """Return hooks that switch a mode on before a module's forward pass, and off after it."""

    def enter(module: Module, inputs: Any) -> None:
        mode.__enter__()

    def leave(module: Module, inputs: Any, output: Any) -> None:
        mode.__exit__(None, None, None)

    return enter, leave


def _answering(router: ExpertRouter, choose: Choose) -> Callable[[Tensor, int], Any]:
    """Return what a `_TopkMode` shows the calls of one router to."""

    def answer(scores: Tensor, k: int) -> Any:
        if scores.shape[1] == router.num_experts and k == router.topk:
            chosen = choose(scores, k)
            if chosen is None:
                return None
            return torch.return_types.topk((scores.gather(-1, chosen), chosen))
        if scores.shape[1] == router.num_groups:
            chosen = choose(scores, 0)
            if chosen is not None:
                return _groups_of(chosen, router, scores, k)
        return None

    return answer


def _groups_of(chosen: Tensor, router: ExpertRouter, scores: Tensor, k: int) -> Any:
    """Choose the groups that the chosen experts are in, and fill up with the best of the others."""
    groups = chosen // (router.num_experts // router.num_groups)
    is_chosen = torch.zeros_like(scores).scatter(-1, groups, 1.0)
    indices = torch.topk(scores.detach() + 1e6 * is_chosen, k).indices
    return torch.return_types.topk((scores.gather(-1, indices), indices))


@contextmanager
def capture(routers: list[ExpertRouter]) -> Iterator[list[Tensor]]:
    """Collect the choice `[tokens, topk]` of each router while the block runs, in layer order."""
    chosen: list[Tensor] = []

    def note(scores: Tensor, k: int) -> Tensor | None:
        if not k:
            return None
        chosen.append(torch.topk(scores, k).indices)
        return chosen[-1]

    with _choosing(routers, [note] * len(routers)):
        yield chosen


@contextmanager
def replay(routers: list[ExpertRouter], routes: Tensor) -> Iterator[None]:
    """Make the routers choose `routes` `[tokens, layers, topk]`. The scores keep their gradient. Routes
    cover the layers with experts, or all layers of the model."""
    chosen = [routes[:, place].long() for place in _places(routers, routes.shape[1])]
    with _choosing(routers, [_always(choice) for choice in chosen]):
        yield


def _always(choice: Tensor) -> Choose:
    return lambda scores, k: choice


def _places(routers: list[ExpertRouter], num_layers: int) -> list[int]:
    """Return where the routes of each router are among those of `num_layers` layers."""
    if num_layers == len(routers):
        return list(range(num_layers))
    if routers and num_layers > routers[-1].layer:
        return [router.layer for router in routers]
    raise ModelError(
        f"the engine returns routes of {num_layers} layers, but the model has {len(routers)} layers "
        f"with experts; {NO_REPLAY_HINT}"
    )


def check_replay(model: Any, routers: list[ExpertRouter]) -> float:
    """Return the largest change of a logit when the model's own choices are replayed. Raise ModelError
    if that is more than rounding, or if the model does not follow other choices."""
    family, ids = model.config.model_type, _probe_ids(model)
    if not routers and has_experts(model.config):
        raise ModelError(f"no routers were found in family '{family}': {NO_REPLAY_HINT}")
    if len({router.layer for router in routers}) < len(routers):
        raise ModelError(
            f"family '{family}' has more than one router in a layer: {NO_REPLAY_HINT}"
        )
    if len({(router.num_experts, router.topk) for router in routers}) > 1:
        raise ModelError(
            f"the routers of family '{family}' are not all alike: {NO_REPLAY_HINT}"
        )
    if not routers:
        return 0.0

    def logits() -> Tensor:
        output: Tensor = model(input_ids=ids, use_cache=False).logits
        return output

    with torch.no_grad():
        expected = logits()
        with capture(routers) as own:
            logits()
        routes = torch.stack(own, 1)
        with replay(routers, routes):
            error = float((logits() - expected).abs().max())
        with replay(routers, (routes + 1) % routers[0].num_experts):
            is_followed = not torch.equal(logits(), expected)
    can_differ = routers[0].topk < routers[0].num_experts
    if error > TOLERANCE or (can_differ and not is_followed):
        raise ModelError(
            f"routes cannot be replayed in family '{family}' (largest difference {error:.2g}): "
            f"{NO_REPLAY_HINT}"
        )
    return error
