"""Proves on a loaded model that rows which share a forward pass do not change each other."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, RollwayError
from .packing import PACKINGS, Packing, RowModel, RowTokens
from .routers import find_routers

TOLERANCE = 1e-3
"""Largest difference of a log-probability that counts as equal, in float32."""
LEAK_SHARE = 0.01
"""If rows that see each other change a log-probability by less than TOLERANCE, this share of that
change counts as equal: a model with small random weights shows its errors only in small numbers."""
NOISE = 2e-5
ROUNDED_TOLERANCE = 0.02
ROUNDED_LEAK_SHARE = 0.05
"""After rounding, a router may choose another expert for a few tokens. So the mean over all tokens is
compared, and this share of what it would be if rows saw each other counts as equal."""
NUM_FIRST = 16
"""How many tokens at the start of a row are compared."""
WINDOW_NAME = re.compile(
    r"window(_size)?$|chunk_size$|^local_attention$|^index_topk$|^indexer_budget$"
)
"""What model families call how far back some of their layers look, or how much they compute at once."""


def open_rows(model: Any, proven: Packing | None = None) -> RowModel:
    """Return the model, ready to be trained, with the first way to compute rows that is right. `proven`
    is the way that was found for the same model before: then nothing is proven again."""
    with naming_failures(model):
        routers = find_routers(model.eval())
    rows = RowModel(model, routers, "single")
    if proven is None:
        prove(rows)
    else:
        make_deterministic(model.train())
        rows.use(proven)
    return rows


@torch.no_grad()
def prove(rows: RowModel, ways: Sequence[Packing] = PACKINGS) -> None:
    """Make `rows` use the first way in which rows do not see each other while the model trains. Two of
    the rows tried are longer than any window of the model, because only then does a window make a
    difference. The row between them is the beginning of the first."""
    model, tried = rows.model.eval(), _probe_rows(rows.model)
    rows.use("single")
    with naming_failures(model):
        alone, tolerance = _compute_alone(rows, tried)
    make_deterministic(model.train())
    for packing in ways:
        passes = tried if packing == "single" else [_joined(tried)]
        try:
            rows.use(packing)
            found = torch.cat([_logprobs(rows, tokens) for tokens in passes])
        except Exception as failure:  # the model's own code may raise anything
            rows.errors[packing] = describe(failure)
            continue
        error = _difference(found, alone, model.dtype)
        if error <= tolerance:
            rows.difference = error
            return
        rows.errors[packing] = f"log-probabilities differ by {error:.2g}"
    reasons = "; ".join(f"{packing}: {error}" for packing, error in rows.errors.items())
    raise _refused(model, f"the same row gives different probabilities ({reasons})")


def prove_rounded(rows: RowModel) -> None:
    """Prove the way of `rows` again after the model's weights were rounded, or choose a later one."""
    try:
        prove(rows, PACKINGS[PACKINGS.index(rows.packing) :])
    except ModelError as error:
        raise ModelError(f"{error}; set trainer.dtype = 'float32'") from None


def _compute_alone(rows: RowModel, tried: Sequence[RowTokens]) -> tuple[Tensor, float]:
    """Return the log-probabilities of each row alone, and which difference from them counts as equal.
    Raise ModelError if the model gives others every time, or if tokens change those before them."""
    model, (_, beginning, last) = rows.model, tried
    alone = [_logprobs(rows, row) for row in tried]
    again = _logprobs(rows, beginning)
    start = _probe_row(last.token_ids[:NUM_FIRST])
    both = _joined([beginning, start])
    seeing = _logprobs(rows, both._replace(lengths=[2 * NUM_FIRST]))[NUM_FIRST:]
    leak = _difference(seeing, alone[2][:NUM_FIRST], model.dtype)
    tolerance = max(NOISE, min(TOLERANCE, LEAK_SHARE * leak))
    if model.dtype != torch.float32:
        tolerance = max(ROUNDED_TOLERANCE, ROUNDED_LEAK_SHARE * leak)
    reasons = {
        "two passes over one row give different probabilities": again,
        "tokens change the probabilities of the tokens before them": alone[0][:NUM_FIRST],
    }
    for reason, found in reasons.items():
        if (error := _difference(found, alone[1], model.dtype)) > tolerance:
            raise _refused(model, f"{reason} (log-probabilities differ by {error:.2g})")
    return torch.cat(alone), tolerance


def _refused(model: Any, reason: str) -> ModelError:
    return ModelError(
        f"models of family '{model.config.model_type}' cannot be trained: {reason}"
    )


def _difference(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return how much log-probabilities `[tokens, vocabulary]` differ."""
    of_tokens = (found - expected).abs().amax(-1)
    return float(of_tokens.max() if dtype == torch.float32 else of_tokens.mean())


def _logprobs(rows: RowModel, tokens: RowTokens) -> Tensor:
    with rows.logits(tokens) as logits:
        return torch.log_softmax(logits.float(), dim=-1)


def longest_window(config: Any) -> int:
    """Return how far back the layers with the widest window see. Windows wider than the longest text
    that the model takes do not count."""
    limit, settings = _longest_text(config), vars(config.get_text_config())
    sizes = [value for name, value in settings.items() if WINDOW_NAME.search(name)]
    sizes.append(settings.get("index_block_size", 0) * settings.get("index_topk_blocks", 0))
    return max((size for size in sizes if isinstance(size, int) and size < limit), default=0)


def _longest_text(config: Any) -> int:
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30


def _probe_rows(model: Any) -> list[RowTokens]:
    """Return two long rows of random tokens, and between them the beginning of the first."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    longest = min(longest_window(config) + 61, _longest_text(config) - 41)
    length = max(longest, NUM_FIRST + 1)
    vocab_size = config.get_text_config().vocab_size
    first, last = (
        torch.randint(vocab_size, (size,), generator=generator)
        for size in (length, length + 41)
    )
    return [_probe_row(ids) for ids in (first, first[:NUM_FIRST], last)]


def _probe_row(ids: Tensor) -> RowTokens:
    """Return a row of which the logits of the first and the last tokens are wanted."""
    length = len(ids)
    ends = torch.arange(max(NUM_FIRST, length - 32), length)
    return RowTokens(ids, [length], torch.cat((torch.arange(NUM_FIRST), ends)))


def _joined(rows: Sequence[RowTokens]) -> RowTokens:
    lengths = [len(row.token_ids) for row in rows]
    starts = accumulate(lengths, initial=0)
    wanted = [row.wanted + start for row, start in zip(rows, starts, strict=False)]
    return RowTokens(torch.cat([row.token_ids for row in rows]), lengths, torch.cat(wanted))


def make_deterministic(model: Any) -> None:
    """Switch off what makes two passes of a model in training differ: dropout and router jitter."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and re.search("drop|jitter", name):
                setattr(module, name, 0.0)


@contextmanager
def naming_failures(model: Any) -> Iterator[None]:
    """Turn whatever a model's own code raises into a ModelError."""
    try:
        yield
    except RollwayError:
        raise
    except Exception as failure:
        raise ModelError(
            f"a forward pass of the model (family '{model.config.model_type}') fails: "
            f"{describe(failure)}"
        ) from None


def describe(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]
