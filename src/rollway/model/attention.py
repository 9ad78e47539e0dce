"""Attention for sequences that share one forward pass: rows laid end to end, or slots of an engine.

Models call `attend` in every layer instead of their own attention, once `ATTENTION` is set as their
implementation. It knows which tokens belong together, so a mask over all pairs of tokens is never made.
Only layers with a softcap or sinks, and no window, take memory for all pairs of one row. On a GPU, in 16
bits, all rows are computed by one kernel of flash attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "rollway"
"""The name under which transformers knows `attend`."""
MIN_BLOCK = 512
"""With a window, this many queries at least are computed at once."""
MAX_FLASH_SIZE = 256
"""The largest head that flash attention takes."""


class Rows(NamedTuple):
    """Rows of these lengths lie end to end in a batch of one."""

    lengths: list[int]


class Slots(NamedTuple):
    """New tokens at `positions` `[slots, tokens]` see the first `end` places of a cache."""

    positions: Tensor
    end: int


class Head(NamedTuple):
    """How a layer turns queries and keys into weights. Sinks `[heads]` take a share of the weights."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


_layout: Rows | Slots | None = None
"""Not a context variable: a backward pass may call `attend` again in a thread of torch."""


@contextmanager
def laid_out(layout: Rows | Slots) -> Iterator[None]:
    """Say what the forward passes of the block contain, and their backward passes."""
    global _layout
    before, _layout = _layout, layout
    try:
        yield
    finally:
        _layout = before


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Do what transformers asks of an attention implementation, for the current layout."""
    scale = options.get("scaling")
    head = Head(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    if isinstance(_layout, Rows) and head.is_plain and can_flash(query, value):
        return _attend_flash(query, key, value, head, _layout.lengths), None
    if (repeats := query.shape[1] // key.shape[1]) > 1:
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    match _layout:
        case Rows(lengths):
            parts = [tensor.split(lengths, dim=2) for tensor in (query, key, value)]
            rows = zip(*parts, strict=True)
            output = torch.cat([_attend_row(q, k, v, head) for q, k, v in rows], dim=2)
        case Slots(positions, end):
            output = _attend_slots(query, key, value, head, positions, end)
        case None:
            output = _attend_row(query, key, value, head)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)


def can_flash(query: Tensor, value: Tensor) -> bool:
    """Return whether flash attention takes these tensors."""
    size = query.shape[-1]
    is_short = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_short and value.shape[-1] == size <= MAX_FLASH_SIZE


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, head: Head, lengths: list[int]
) -> Tensor:
    """Attend within all rows at once. Return `[1, tokens, heads, size]`."""
    from torch.nn.attention.varlen import varlen_attn  # its import takes a second

    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query.device)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    longest, before = max(lengths), head.window - 1 if head.window else -1
    output = varlen_attn(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        scale=head.scale,
        window_size=(before, 0),
        enable_gqa=True,
    )
    assert isinstance(output, Tensor)
    return output[None]


def _attend_slots(
    query: Tensor, key: Tensor, value: Tensor, head: Head, positions: Tensor, end: int
) -> Tensor:
    places, at = torch.arange(end, device=query.device), positions[:, None, :, None]
    return _attend_where(query, key, value, _visible(places, at, head.window), head)


def _attend_row(query: Tensor, key: Tensor, value: Tensor, head: Head) -> Tensor:
    """Attend within one row. With a window the queries are computed in blocks, each with a mask over the
    keys that it can see, so that memory grows with the length and not with its square."""
    length, window = query.shape[2], head.window or query.shape[2]
    if head.is_plain and window >= length:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=head.scale
        )
    blocks, size = [], max(window, MIN_BLOCK)
    for start in range(0, length, size):
        end, first = min(start + size, length), max(0, start - window + 1)
        places = torch.arange(first, end, device=query.device)
        at = torch.arange(start, end, device=query.device)[:, None]
        seen = key[:, :, first:end], value[:, :, first:end]
        mask = _visible(places, at, head.window)
        blocks.append(_attend_where(query[:, :, start:end], *seen, mask, head))
    return torch.cat(blocks, dim=2)


def _visible(places: Tensor, at: Tensor, window: int | None) -> Tensor:
    """Return which places a token at each position sees: itself and those before it in its window."""
    mask = places <= at
    return mask & (places > at - window) if window else mask


def _attend_where(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, head: Head
) -> Tensor:
    if head.is_plain:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=head.scale
        )
    scores = query @ key.transpose(2, 3) * head.scale
    if head.softcap is not None:
        scores = torch.tanh(scores / head.softcap) * head.softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if head.sinks is not None:
        sinks = head.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[2]] @ value
