"""Scores texts of equal length: the logprob of every token, and the experts that it goes to."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .routers import ExpertRouter, capture


class TextScores(NamedTuple):
    """Scores of texts `[texts, tokens]`. `top_ids` and `top_logprobs` are those of the token that is
    most likely to follow each text."""

    logprobs: Tensor
    """`[texts, tokens - 1]`: the first token of a text has none."""
    routes: Tensor | None
    """`[texts, tokens, layers, topk]`, in the layers that have experts."""
    top_ids: Tensor
    top_logprobs: Tensor


@torch.no_grad()
def score_texts(model: Any, routers: list[ExpertRouter], ids: Tensor) -> TextScores:
    """Compute the scores in one forward pass. Texts of equal length lie beside each other without any
    padding, so this is right for every model."""
    with capture(routers) as chosen:
        output = model(input_ids=ids.to(model.device), use_cache=False)
    logprobs = torch.log_softmax(output.logits.float(), dim=-1).cpu()
    drawn = logprobs[:, :-1].gather(-1, ids[:, 1:, None].cpu())[..., 0]
    top = logprobs[:, -1].max(dim=-1)
    routes = None
    if chosen:
        routes = torch.stack(chosen, dim=1).view(*ids.shape, len(chosen), -1).cpu()
    return TextScores(drawn, routes, top.indices, top.values)
