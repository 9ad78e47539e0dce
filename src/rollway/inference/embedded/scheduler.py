"""Continuous batching: sequences join and leave between two decoding steps."""

from collections import deque

import numpy as np
import torch
from msgspec import Struct

from ...records.turn import Routes
from .slots import SlotModel

PREFILL_TOKENS = 4096
"""Prompt tokens, with padding, taken in at one step."""


class GenerationRequest(Struct, frozen=True):
    """What to generate."""

    id: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    routes_start: int
    seed: int | None = None


class TokenSequence:
    """One request being decoded."""

    def __init__(self, ask: GenerationRequest, rng: np.random.Generator) -> None:
        self.ask = ask
        self.rng = rng
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason = ""
        self._routes: list[Routes] = []

    @property
    def length(self) -> int:
        return len(self.ask.prompt) + len(self.tokens)

    def add_routes(self, routes: Routes) -> None:
        self._routes.append(routes)

    def routes(self) -> Routes | None:
        """Expert choices from `routes_start` to the last token but one."""
        if not self._routes:
            return None
        return np.concatenate(self._routes)[self.ask.routes_start :]

    def take(self, token: int, logprob: float, version: int, max_context: int) -> None:
        """One more token; sets `finish_reason` if it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.ask.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.ask.max_tokens or self.length >= max_context:
            self.finish_reason = "length"


class Scheduler:
    """Waiting sequences move into free slots; running ones fill slots 0 to n without gaps."""

    def __init__(self, model: SlotModel, seed: int) -> None:
        self._model = model
        self._rng = np.random.default_rng(seed)
        self._waiting: deque[TokenSequence] = deque()
        self._running: list[TokenSequence] = []
        self.paused = False
        self.version = 0

    @property
    def has_work(self) -> bool:
        return not self.paused and bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, ask: GenerationRequest) -> None:
        rng = self._rng if ask.seed is None else np.random.default_rng(ask.seed)
        self._waiting.append(TokenSequence(ask, rng))

    def abort(self, id: int) -> None:
        """Forget a request, wherever it is."""
        self._waiting = deque(one for one in self._waiting if one.ask.id != id)
        for slot, one in enumerate(self._running):
            if one.ask.id == id:
                self._free(slot)
                break

    def step(self) -> list[TokenSequence]:
        """Take in what fits, decode one token of everything running; returns what finished."""
        joining = self._joining()
        if joining:
            first = len(self._running)
            self._running += joining
            self._advance(first, [one.ask.prompt for one in joining], starts=[0] * len(joining))
        else:
            last = [[one.tokens[-1]] for one in self._running]
            self._advance(0, last, starts=[one.length - 1 for one in self._running])
        return self._finished()

    def _joining(self) -> list[TokenSequence]:
        """Waiting sequences for the free slots, as many as one prompt pass takes."""
        joining: list[TokenSequence] = []
        widest = 0
        while self._waiting and len(self._running) + len(joining) < self._model.num_slots:
            widest = max(widest, len(self._waiting[0].ask.prompt))
            if joining and widest * (len(joining) + 1) > PREFILL_TOKENS:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _advance(self, first: int, new_ids: list[list[int]], starts: list[int]) -> None:
        """One forward pass over slots from `first`, then one drawn token for each."""
        device = self._model.device
        lengths = [len(ids) for ids in new_ids]
        widest = max(lengths)
        padded = torch.tensor([ids + [0] * (widest - len(ids)) for ids in new_ids], device=device)
        logits, routes = self._model.forward(
            first, padded, torch.tensor(starts, device=device), torch.tensor(lengths, device=device)
        )
        sequences = self._running[first : first + len(new_ids)]
        tokens, logprobs = draw(logits, sequences)
        drawn = zip(sequences, tokens, logprobs, strict=True)
        chosen = None if routes is None else routes.cpu().numpy()
        for index, (sequence, token, logprob) in enumerate(drawn):
            if chosen is not None:
                sequence.add_routes(chosen[index, : lengths[index]])
            sequence.take(token, logprob, self.version, self._model.max_context)

    def _finished(self) -> list[TokenSequence]:
        done = [one for one in self._running if one.finish_reason]
        for slot in reversed(range(len(self._running))):
            if self._running[slot].finish_reason:
                self._free(slot)
        return done

    def _free(self, slot: int) -> None:
        """Close the gap a sequence leaves with the last one."""
        last = self._running.pop()
        if slot < len(self._running):
            self._model.move(len(self._running), slot, last.length)
            self._running[slot] = last


def draw(logits: torch.Tensor, sequences: list[TokenSequence]) -> tuple[list[int], list[float]]:
    """One token for each sequence, by inverting the cumulative distribution at a uniform number.

    The logprob is that of the distribution drawn from: after temperature and top-p.
    """
    greedy = np.array([one.ask.temperature == 0 for one in sequences])
    scale = torch.tensor([one.ask.temperature or 1.0 for one in sequences], device=logits.device)
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
    if any(one.ask.top_p < 1 for one in sequences):
        logprobs = _nucleus(logprobs, [one.ask.top_p for one in sequences])
    mass = logprobs.double().exp().cumsum(-1)
    uniform = torch.tensor(
        [one.rng.random() for one in sequences], dtype=torch.float64, device=logits.device
    )
    drawn = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)[:, 0]
    drawn = drawn.clamp(max=logits.shape[-1] - 1)
    best = torch.as_tensor(greedy, device=logits.device)
    tokens = torch.where(best, logprobs.argmax(-1), drawn)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()


def _nucleus(logprobs: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """Keep the smallest set of tokens that holds `top_p` of the mass."""
    ordered, index = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    limit = torch.tensor(top_p, device=logprobs.device)[:, None]
    ordered = ordered.masked_fill(before >= limit, float("-inf"))
    kept = torch.full_like(logprobs, float("-inf")).scatter(-1, index, ordered)
    return torch.log_softmax(kept, dim=-1)
