"""Continuous batching: sequences join and leave the batch between two forward passes."""

from collections import deque

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from ...records.turn import Routes
from .slots import DecodingModel

PREFILL_TOKENS = 4096
"""How many prompt tokens, with padding, one forward pass takes at most."""


class GenerationRequest(Struct, frozen=True):
    """A checked request: the prompt, and how to draw its completion."""

    id: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    routes_start: int
    seed: int | None = None


class TokenSequence:
    def __init__(self, request: GenerationRequest, rng: np.random.Generator) -> None:
        self.request = request
        self.rng = rng
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason = ""
        self.route_pieces: list[Routes] = []

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    def routes(self) -> Routes | None:
        """Return the routes from `routes_start` to the last token but one, or None without experts."""
        if not self.route_pieces:
            return None
        return np.concatenate(self.route_pieces)[self.request.routes_start :]

    def add_token(self, token: int, logprob: float, version: int, max_context: int) -> None:
        """Add a drawn token, and set `finish_reason` if it is the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.request.max_tokens or self.length >= max_context:
            self.finish_reason = "length"


class Scheduler:
    """Moves waiting sequences into free slots. Running sequences fill the slots from 0 without gaps."""

    def __init__(self, model: DecodingModel, seed: int) -> None:
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
    def load(self) -> dict[str, int]:
        return {"running": len(self._running), "waiting": len(self._waiting)}

    def add(self, request: GenerationRequest) -> None:
        rng = self._rng if request.seed is None else np.random.default_rng(request.seed)
        self._waiting.append(TokenSequence(request, rng))

    def abort(self, request_id: int) -> None:
        waiting = self._waiting
        self._waiting = deque(item for item in waiting if item.request.id != request_id)
        running = [sequence.request.id for sequence in self._running]
        if request_id in running:
            self._free(running.index(request_id))

    def run_pass(self) -> list[TokenSequence]:
        """Draw one token for each new sequence that fits, or else for each running one. Return the
        sequences that this finished."""
        joining = self._pop_joining()
        running = self._running
        if joining:
            first = len(running)
            running += joining
            prompts = [sequence.request.prompt for sequence in joining]
            self._advance(first, prompts, starts=[0] * len(joining))
        else:
            last = [[sequence.tokens[-1]] for sequence in running]
            self._advance(0, last, starts=[sequence.length - 1 for sequence in running])
        finished = [sequence for sequence in running if sequence.finish_reason]
        for slot in reversed(range(len(running))):
            if running[slot].finish_reason:
                self._free(slot)
        return finished

    def _pop_joining(self) -> list[TokenSequence]:
        """Take waiting sequences for the free slots, as many as one forward pass takes."""
        joining: list[TokenSequence] = []
        widest = 0
        while self._waiting and len(self._running) + len(joining) < self._model.num_slots:
            widest = max(widest, len(self._waiting[0].request.prompt))
            if joining and widest * (len(joining) + 1) > PREFILL_TOKENS:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _advance(self, first: int, new_ids: list[list[int]], starts: list[int]) -> None:
        """Run one forward pass over the slots from `first`, then draw one token for each."""
        lengths = [len(ids) for ids in new_ids]
        widest = max(lengths)
        padded = [ids + [0] * (widest - len(ids)) for ids in new_ids]
        device = self._model.device
        inputs = [
            torch.tensor(numbers, device=device) for numbers in (padded, starts, lengths)
        ]
        logits, routes = self._model.forward(first, *inputs)
        sequences = self._running[first : first + len(new_ids)]
        tokens, logprobs = draw(logits, sequences)
        drawn = zip(sequences, tokens, logprobs, strict=True)
        chosen = None if routes is None else routes.cpu().numpy()
        for index, (sequence, token, logprob) in enumerate(drawn):
            if chosen is not None:
                sequence.route_pieces.append(chosen[index, : lengths[index]])
            sequence.add_token(token, logprob, self.version, self._model.max_context)

    def _free(self, slot: int) -> None:
        """Remove the sequence in `slot` and move the last sequence into the gap."""
        last = self._running.pop()
        if slot < len(self._running):
            self._model.move(len(self._running), slot, last.length)
            self._running[slot] = last


def draw(logits: Tensor, sequences: list[TokenSequence]) -> tuple[list[int], list[float]]:
    """Draw one token for each sequence, by inverting the cumulative distribution at a uniform number.
    The logprobs are those of the distribution drawn from: after temperature and top-p."""
    requests, device = [sequence.request for sequence in sequences], logits.device
    is_greedy = torch.tensor(
        [request.temperature == 0 for request in requests], device=device
    )
    scale = torch.tensor([request.temperature or 1.0 for request in requests], device=device)
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
    if any(request.top_p < 1 for request in requests):
        logprobs = _keep_nucleus(logprobs, [request.top_p for request in requests])
    mass = logprobs.double().exp().cumsum(-1)
    numbers = [sequence.rng.random() for sequence in sequences]
    uniform = torch.tensor(numbers, dtype=torch.float64, device=device)
    drawn = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)[:, 0]
    drawn = drawn.clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(is_greedy, logprobs.argmax(-1), drawn)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()


def _keep_nucleus(logprobs: Tensor, top_p: list[float]) -> Tensor:
    """Keep the smallest set of tokens that holds `top_p` of the probability mass."""
    ordered, index = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    limit = torch.tensor(top_p, device=logprobs.device)[:, None]
    ordered = ordered.masked_fill(before >= limit, float("-inf"))
    kept = torch.full_like(logprobs, float("-inf")).scatter(-1, index, ordered)
    return torch.log_softmax(kept, dim=-1)
