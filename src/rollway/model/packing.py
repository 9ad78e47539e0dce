"""Computes several rows in one forward pass, in a way that is proven when the model is loaded.

There are three ways. `packed`: rows lie end to end, and attention keeps them apart; nothing is wasted.
`padded`: rows of similar length lie beside each other; this also suits models that carry a state from
token to token. `single`: one row at a time. The first way in which two rows together give the same
probabilities as each of them alone is used.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import ModelError
from .attention import ATTENTION, Rows, laid_out
from .routers import ExpertRouter, find_routers, replay

Packing = Literal["packed", "padded", "single"]
PACKINGS: tuple[Packing, ...] = ("packed", "padded", "single")
MAX_PADDING = 1.25
"""Padded rows take at most this many times the tokens that they have."""
TOLERANCE = 1e-3
"""Largest difference of a log-probability that counts as equal, in float32."""
LEAK_SHARE = 0.01
"""If rows that see each other change a log-probability by less than TOLERANCE, this share of that
change counts as equal: a model with small random weights shows its errors only in small numbers."""
NOISE = 2e-5
WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "local_attention",
    "attention_window_size",
    "index_topk",
)
"""The names that model families give to how far back some of their layers look."""


class RowTokens(NamedTuple):
    """Rows end to end. `wanted` are the indices whose logits are wanted, in ascending order."""

    token_ids: Tensor
    lengths: list[int]
    wanted: Tensor
    routes: Tensor | None = None


class RowModel:
    """A model with the way in which it computes several rows at once."""

    def __init__(self, model: Any, proven: Packing | None = None) -> None:
        """`proven` is the way that was found for the same model before: then nothing is proven again."""
        self.model = model.eval()
        try:
            self.routers: list[ExpertRouter] = find_routers(model)
        except Exception as failure:  # the model's own code may raise anything
            raise ModelError(
                f"a forward pass of the model (family '{model.config.model_type}') fails: "
                f"{describe(failure)}"
            ) from None
        self.errors: dict[Packing, str] = {}
        """Why the ways that come before `packing` are not used."""
        self.difference = 0.0
        """The largest difference of a log-probability between two rows together and each alone."""
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._own_attention: str = model.config._attn_implementation
        self.packing: Packing = proven or "single"
        if proven is None:
            self.packing = self._prove()
        else:
            make_deterministic(model.train())
            self._use(proven)

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

    @torch.no_grad()
    def _prove(self) -> Packing:
        """Return the first way in which two rows do not see each other while the model trains. They are
        longer than any window of the model, because only then does a window make a difference."""
        length = longest_window(self.model.config) + 61
        rows = [_probe_row(self.model, length + extra, extra) for extra in (0, 41)]
        self.packing = "single"
        alone = torch.cat([self._logprobs(row) for row in rows])
        both = RowTokens(
            torch.cat([row.token_ids for row in rows]),
            [len(row.token_ids) for row in rows],
            torch.cat([rows[0].wanted, rows[1].wanted + len(rows[0].token_ids)]),
        )
        one_row = self._logprobs(both._replace(lengths=[sum(both.lengths)]))
        leak = float((one_row - alone).abs().max())
        tolerance = max(NOISE, min(TOLERANCE, LEAK_SHARE * leak))
        make_deterministic(self.model.train())
        for packing in PACKINGS:
            passes = rows if packing == "single" else [both]
            try:
                self._use(packing)
                found = torch.cat([self._logprobs(tokens) for tokens in passes])
            except Exception as failure:  # the model's own code may raise anything
                self.errors[packing] = describe(failure)
                continue
            error = float((found - alone).abs().max())
            if error <= tolerance:
                self.difference = error
                return packing
            self.errors[packing] = f"log-probabilities differ by {error:.2g}"
        reasons = "; ".join(f"{packing}: {error}" for packing, error in self.errors.items())
        raise ModelError(
            f"models of family '{self.model.config.model_type}' cannot be trained: the same row gives "
            f"different probabilities ({reasons})"
        )

    def _use(self, packing: Packing) -> None:
        self.packing = packing
        attention = ATTENTION if packing == "packed" else self._own_attention
        self.model.set_attn_implementation(attention)

    def _logprobs(self, tokens: RowTokens) -> Tensor:
        with self.logits(tokens) as logits:
            return torch.log_softmax(logits.float(), dim=-1)


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


def longest_window(config: Any) -> int:
    """Return how far back the layers with the widest window see. Windows wider than the longest text
    that the model takes do not count."""
    text = config.get_text_config()
    windows = [getattr(text, name, None) for name in WINDOWS]
    limit = getattr(text, "max_position_embeddings", None) or 1 << 30
    return max((window for window in windows if window and window < limit), default=0)


def _probe_row(model: Any, length: int, seed: int) -> RowTokens:
    """Return a row of random tokens, of which the logits of the first and the last are wanted."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (length,), generator=generator)
    wanted = torch.cat((torch.arange(16), torch.arange(length - 32, length)))
    return RowTokens(ids, [length], wanted)


def make_deterministic(model: Any) -> None:
    """Switch off what makes two passes of a model in training differ: dropout and router jitter."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and re.search("drop|jitter", name):
                setattr(module, name, 0.0)


def describe(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]
