"""Computes several rows in one forward pass.

There are three ways. `packed`: rows lie end to end, and attention keeps them apart; nothing is wasted.
`padded`: rows of similar length lie beside each other; this also suits models that carry a state from
token to token. `single`: one row at a time. `proof.py` finds out which of them is right for a model.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .attention import ATTENTION, Rows, laid_out
from .routers import ExpertRouter, replay

Packing = Literal["packed", "padded", "single"]
PACKINGS: tuple[Packing, ...] = ("packed", "padded", "single")
MAX_PADDING = 1.25
"""Padded rows take at most this many times the tokens that they have."""


class RowTokens(NamedTuple):
    """Rows end to end. `wanted` are the indices whose logits are wanted, in ascending order."""

    token_ids: Tensor
    lengths: list[int]
    wanted: Tensor
    routes: Tensor | None = None


class RowModel:
    """A model with the way in which it computes several rows at once."""

    def __init__(self, model: Any, routers: list[ExpertRouter], packing: Packing) -> None:
        self.model = model
        self.routers = routers
        self.errors: dict[Packing, str] = {}
        """Why the ways that come before `packing` are not used."""
        self.difference = 0.0
        """The largest difference of a log-probability between rows together and each alone."""
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._own_attention: str = model.config._attn_implementation
        self.use(packing)

    def use(self, packing: Packing) -> None:
        self.packing = packing
        attention = ATTENTION if packing == "packed" else self._own_attention
        self.model.set_attn_implementation(attention)

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """Split rows into forward passes."""
        if self.packing == "packed":
            return [list(range(len(lengths)))]
        if self.packing == "single":
            return [[row] for row in range(len(lengths))]
        return similar_lengths(lengths)

    @contextmanager
    def logits(self, tokens: RowTokens) -> Iterator[Tensor]:
        """Give the logits `[wanted, vocabulary]` of one forward pass to the block, in which their
        backward pass has to run too."""
        with ExitStack() as stack:
            if self.packing == "packed":
                yield self._packed(tokens, stack)
            else:
                yield self._padded(tokens, stack)

    def _packed(self, tokens: RowTokens, stack: ExitStack) -> Tensor:
        positions = torch.cat([torch.arange(length) for length in tokens.lengths])
        stack.enter_context(laid_out(Rows(tokens.lengths)))
        if tokens.routes is not None:
            stack.enter_context(replay(self.routers, tokens.routes.to(self.device)))
        arguments = {"position_ids": positions[None].to(self.device)}
        return self._forward(tokens.token_ids[None], tokens.wanted, **arguments)[0]

    def _padded(self, tokens: RowTokens, stack: ExitStack) -> Tensor:
        lengths, width = tokens.lengths, max(tokens.lengths)
        ids = torch.zeros(len(lengths), width, dtype=torch.long)
        is_token = torch.arange(width) < torch.tensor(lengths)[:, None]
        ids[is_token] = tokens.token_ids
        if tokens.routes is not None:
            _, num_layers, topk = tokens.routes.shape
            # padding may choose any experts, but not one of them twice
            routes = torch.arange(topk).expand(*ids.shape, num_layers, topk).clone()
            routes[is_token] = tokens.routes.long()
            stack.enter_context(replay(self.routers, routes.flatten(0, 1).to(self.device)))
        rows, places = (index[tokens.wanted] for index in is_token.nonzero().unbind(1))
        kept, where = torch.unique(places, return_inverse=True)
        logits = self._forward(ids, kept)
        return logits[rows.to(self.device), where.to(self.device)]

    def _forward(self, ids: Tensor, kept: Tensor, **arguments: Any) -> Tensor:
        if self._keeps_logits:
            arguments["logits_to_keep"] = kept.to(self.device)
        output = self.model(input_ids=ids.to(self.device), use_cache=False, **arguments)
        logits: Tensor = output.logits
        return logits if self._keeps_logits else logits[:, kept.to(self.device)]


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group rows so that padding them to the longest of their group adds little."""
    groups: list[list[int]] = []
    num_tokens = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        num_tokens += lengths[row]
        width = lengths[groups[-1][0]] if groups else 0
        if not groups or width * (len(groups[-1]) + 1) > MAX_PADDING * num_tokens:
            groups.append([])
            num_tokens = lengths[row]
        groups[-1].append(row)
    return groups
