"""A model with a key-value cache of slots: sequences of any length share a batch."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from ...errors import ModelError
from ...model.attention import ATTENTION, Slots, laid_out
from ...model.proof import describe, longest_window, naming_failures
from ...model.routers import ExpertRouter, capture, find_routers
from ...model.scoring import TextScores, score_texts

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of a token's logits that counts as equal, as a share of their size. In bfloat16 a
router may choose another expert for a few tokens, so the median of a text counts."""
NUM_PROBED = 4
"""Tokens that are decoded one by one when a model is loaded, to prove that decoding is right."""


class DecodingModel(Protocol):
    """Runs forward passes over prompts and single tokens alike: new tokens in, next-token logits out."""

    device: torch.device
    num_slots: int
    max_context: int

    def forward(
        self, first_slot: int, ids: Tensor, starts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Process `lengths[i]` new tokens of slot `first_slot + i` from position `starts[i]`. Return the
        logits after each slot's last new token, and routes `[slots, tokens, layers, topk]`. `ids` is
        padded on the right. No token attends to the padding, and the next tokens overwrite it."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence of `length` tokens from one slot to another."""
        ...

    def score(self, ids: Tensor) -> TextScores:
        """Return the logprobs of texts `[texts, tokens]`, computed without any cache."""
        ...


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
            self._keys.append(self._new_store(key_states))
            self._values.append(self._new_store(value_states))
        views = []
        for store, new in ((self._keys, key_states), (self._values, value_states)):
            slots = store[layer_idx][self._slots]
            at = self._positions[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
            slots.scatter_(2, at, new)
            views.append(slots[:, :, : self._end])
        return views[0], views[1]

    def _new_store(self, states: Tensor) -> Tensor:
        num_slots, max_context = self._size
        _, num_heads, _, size = states.shape
        return states.new_zeros(num_slots, num_heads, max_context, size)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for store in (*self._keys, *self._values):
            store[target, :, :length] = store[source, :, :length]


class SlotModel:
    """Decodes all slots in one pass. For models whose layers keep keys and values and nothing else."""

    def __init__(self, model: Any, num_slots: int, max_context: int) -> None:
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            raise ModelError("its attention cannot be replaced")
        self.model = model.eval()
        self.device: torch.device = model.device
        self.num_slots = num_slots
        self.max_context = max_context
        self._cache = SlotCache(num_slots, max_context)
        self._routers = find_routers(model)
        self.move = self._cache.move

    @torch.inference_mode()
    def forward(
        self, first_slot: int, ids: Tensor, starts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        positions = starts[:, None] + torch.arange(ids.shape[1], device=ids.device)
        end = int((starts + lengths).max())
        self._cache.aim(first_slot, positions, end)
        kept, where = torch.unique(lengths - 1, return_inverse=True)
        with laid_out(Slots(positions, end)), capture(self._routers) as chosen:
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=kept,
            )
        logits = output.logits[torch.arange(len(ids), device=ids.device), where].float()
        if not chosen:
            return logits, None
        routes = torch.stack(chosen, dim=1).to(route_dtype(self._routers))
        return logits, routes.view(*ids.shape, *routes.shape[1:])

    def score(self, ids: Tensor) -> TextScores:
        return score_texts(self.model, self._routers, ids)


class SeparateModel:
    """Decodes one sequence after the other, each with a cache as transformers makes it. Slower than
    SlotModel, but right for every model that transformers can decode with a cache."""

    def __init__(self, model: Any, num_slots: int, max_context: int) -> None:
        self.model = model.eval()
        self.device: torch.device = model.device
        self.num_slots = num_slots
        self.max_context = max_context
        self._caches: list[Any] = [None] * num_slots
        self._routers = find_routers(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache_params"

    def move(self, source: int, target: int, length: int) -> None:
        self._caches[target] = self._caches[source]
        self._caches[source] = None

    @torch.inference_mode()
    def forward(
        self, first_slot: int, ids: Tensor, starts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        all_logits, all_routes = [], []
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            slot, new_ids = first_slot + index, ids[index : index + 1, :length]
            if not start:
                self._caches[slot] = DynamicCache(config=self.model.config)
            cache = {self._cache_name: self._caches[slot]}
            with capture(self._routers) as chosen:
                output = self.model(input_ids=new_ids, use_cache=True, **cache)
            all_logits.append(output.logits[0, -1].float())
            if chosen:
                routes = torch.stack(chosen, dim=1)
                num_missing = ids.shape[1] - int(length)
                padding = routes.new_zeros(num_missing, *routes.shape[1:])
                all_routes.append(torch.cat((routes, padding)))
        logits = torch.stack(all_logits)
        if not all_routes:
            return logits, None
        return logits, torch.stack(all_routes).to(route_dtype(self._routers))

    def score(self, ids: Tensor) -> TextScores:
        return score_texts(self.model, self._routers, ids)


def route_dtype(routers: Sequence[ExpertRouter]) -> torch.dtype:
    return torch.uint8 if routers[0].num_experts <= 256 else torch.uint16


def open_slots(model: Any, num_slots: int, max_context: int) -> DecodingModel:
    """Return the fastest way to decode that gives the same logits as one pass over the whole text."""
    attention = model.config._attn_implementation
    length = max(8, min(longest_window(model.config) + 24, max_context - 8))
    texts = [_random_ids(model, length + extra) for extra in (0, 5)]
    can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": NUM_PROBED + 1} if can_keep else {}
    with torch.inference_mode(), naming_failures(model):
        passes = [
            model.eval()(input_ids=text[None], use_cache=False, **options) for text in texts
        ]
    last = slice(-NUM_PROBED - 1, None)
    expected = torch.stack([output.logits[0, last].float() for output in passes])
    for kind in (SlotModel, SeparateModel):
        try:
            found = _decode(kind(model, 3, length + 8), texts)
            errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
            is_exact = model.dtype == torch.float32
            error = float(errors.max() if is_exact else errors.median(dim=1).values.max())
        except Exception as failure:  # the model's own code may raise anything
            reason = describe(failure)
        else:
            if error <= TOLERANCES[model.dtype]:
                return kind(model, num_slots, max_context)
            reason = f"logits differ by {error:.2%}"
        model.set_attn_implementation(attention)
    raise ModelError(
        f"the embedded engine cannot decode models of family '{model.config.model_type}': "
        f"{reason}; use vLLM or SGLang ([engine.external])"
    )


def _decode(model: DecodingModel, texts: Sequence[Tensor]) -> Tensor:
    """Return the logits `[texts, tokens, vocabulary]` of the last tokens, decoded one by one. On the way
    a sequence moves to another slot, as happens when the sequence there has ended."""
    starts = torch.tensor([len(text) - NUM_PROBED for text in texts], device=model.device)
    prompts = [text[:start] for text, start in zip(texts, starts, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    logits = [model.forward(1, padded, torch.zeros_like(starts), starts)[0]]
    model.move(1, 0, int(starts[0]))
    model.move(2, 1, int(starts[1]))
    for offset in range(NUM_PROBED):
        ids = torch.stack([text[offset - NUM_PROBED] for text in texts])[:, None]
        found, _ = model.forward(0, ids, starts + offset, torch.ones_like(starts))
        logits.append(found)
    return torch.stack(logits, dim=1)


def _random_ids(model: Any, length: int) -> Tensor:
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(vocab_size, (length,), generator=generator)
    return ids.to(model.device)
