"""Logprobs of a packed micro-batch under the current weights, with the engine's expert choices."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..errors import ModelError
from ..model.routers import find_routers, replay
from .packing import PackedRow


def _replayed(model: Any, packed: PackedRow) -> AbstractContextManager[None]:
    if packed.routes is None:
        return nullcontext()
    routers = find_routers(model)
    if len(routers) != packed.routes.shape[1]:
        raise ModelError(
            f"the engine reports routes of {packed.routes.shape[1]} layers, the model has "
            f"{len(routers)} routers; set trainer.replay_routes=false to train without"
        )
    return replay(routers, packed.routes.to(model.device))


def token_logprobs(
    model: Any, packed: PackedRow, *, replay_routes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each trained token, at the temperature it was drawn with, and the entropy there."""
    device = model.device
    same_row = packed.segments[:, None] == packed.segments[None, :]
    mask = same_row & (packed.positions[:, None] >= packed.positions[None, :])
    with _replayed(model, packed) if replay_routes else nullcontext():
        output = model(
            input_ids=packed.token_ids[None].to(device),
            position_ids=packed.positions[None].to(device),
            attention_mask=mask[None, None].to(device),
            logits_to_keep=(packed.targets - 1).to(device),
            use_cache=False,
        )
    logits = output.logits[0].float() / packed.temperatures[:, None].to(device)
    all_logprobs = torch.log_softmax(logits, dim=-1)
    drawn = packed.token_ids[packed.targets].to(device)
    with torch.no_grad():
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(-1, drawn[:, None])[:, 0], entropy
