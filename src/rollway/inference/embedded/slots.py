"""A model with a preallocated key-value cache of slots: sequences of any length share a batch."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...model.routers import capture, find_routers, num_experts


class SlotCache(DynamicCache):
    """Keys and values `[slots, heads, context, dim]` per layer, written in place. `aim` sets what the
    next forward pass fills. `update`, which the model calls, then returns views of these slots."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        super().__init__()
        self._size = (num_slots, max_context)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots = slice(0, 0)
        self._positions = torch.empty(0, dtype=torch.long)
        self._end = 0

    def aim(self, first_slot: int, positions: Tensor, end: int) -> None:
        """Fill slots from `first_slot` at `positions` `[slots, tokens]`, and attend up to `end`."""
        self._slots = slice(first_slot, first_slot + len(positions))
        self._positions = positions
        self._end = end

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self._keys):
            num_slots, max_context = self._size
            shape = (num_slots, key_states.shape[1], max_context, key_states.shape[3])
            self._keys.append(key_states.new_zeros(shape))
            self._values.append(key_states.new_zeros(shape))
        views = []
        for store, new in ((self._keys, key_states), (self._values, value_states)):
            slots = store[layer_idx][self._slots]
            at = self._positions[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
            slots.scatter_(2, at, new)
            views.append(slots[:, :, : self._end])
        return views[0], views[1]

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for store in (*self._keys, *self._values):
            store[target, :, :length] = store[source, :, :length]


class SlotModel:
    """Runs forward passes over prompts and single tokens alike: new tokens in, next-token logits out."""

    def __init__(self, model: Any, num_slots: int, max_context: int) -> None:
        self.model = model.eval()
        self.device: torch.device = model.device
        self.num_slots = num_slots
        self.max_context = max_context
        self.cache = SlotCache(num_slots, max_context)
        self._routers = find_routers(model)
        self._route_dtype = torch.uint8 if num_experts(model) <= 256 else torch.uint16

    @torch.inference_mode()
    def forward(
        self, first_slot: int, ids: Tensor, starts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Process `lengths[i]` new tokens of slot `first_slot + i` from position `starts[i]`. Return the
        logits after each slot's last new token, and routes `[slots, tokens, layers, topk]`. `ids` is
        padded on the right. No token attends to the padding, and the next tokens overwrite it."""
        positions = starts[:, None] + torch.arange(ids.shape[1], device=ids.device)
        end = int((starts + lengths).max())
        mask = torch.arange(end, device=ids.device) <= positions[:, None, :, None]
        self.cache.aim(first_slot, positions, end)
        last = lengths - 1
        kept, where = torch.unique(last, return_inverse=True)
        with capture(self._routers) as chosen:
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions,
                past_key_values=self.cache, use_cache=True, logits_to_keep=kept,
            )  # fmt: skip
        logits = output.logits[torch.arange(len(ids), device=ids.device), where].float()
        if not chosen:
            return logits, None
        routes = torch.stack(chosen, dim=1).to(self._route_dtype)
        return logits, routes.view(*ids.shape, *routes.shape[1:])
