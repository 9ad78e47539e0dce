"""A row: one token sequence the trainer sees, as columns."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from ..records.rollout import RowSummary
from ..records.turn import Floats, Ints, Routes, Turn
from .detect import detect
from .extra import laid_out
from .routes import check_routes, new_routes

NOT_SAMPLED = -1
"""Version of a token that no policy drew."""

Chunks = tuple[NDArray[np.generic], ...]


class Row(Struct, frozen=True):
    """A finished row. Each column is a tuple of chunks that joined make `num_tokens` entries."""

    num_tokens: int
    num_trainable: int
    token_ids: Chunks
    loss_mask: Chunks
    logprobs: Chunks
    temperatures: Chunks
    versions: Chunks
    routes: Chunks | None
    extra: dict[str, Chunks] = field(default_factory=dict)

    def summary(self) -> RowSummary:
        """Its size, and what of the signs its drawn tokens show."""
        (ids,), (mask,), (logprobs,) = self.token_ids, self.loss_mask, self.logprobs
        drawn = mask.astype(bool)
        detected = detect(ids[drawn], logprobs[drawn])
        return RowSummary(self.num_tokens, self.num_trainable, detected)

    def columns(self) -> dict[str, Chunks]:
        """The columns that exist, by the name they are stored under."""
        columns = {
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "temperatures": self.temperatures,
            "versions": self.versions,
            "loss_mask": self.loss_mask,
            **self.extra,
        }
        return columns if self.routes is None else {**columns, "routes": self.routes}


class RowSpan(Struct, frozen=True):
    """What one turn added to a row: some tokens of the prompt, then those it drew."""

    num_prompt: int
    num_drawn: int
    logprobs: Floats
    versions: Ints
    temperature: float
    extra: dict[str, Floats]


class OpenRow:
    """A row that may still grow. Holds each token once, whatever the number of turns."""

    def __init__(self, turn: Turn) -> None:
        self._ids = bytearray()
        self._spans: list[RowSpan] = []
        self._routes: list[Routes] | None = None if turn.routes is None else []
        self.num_tokens = 0
        self.extend(turn)

    def is_prefix_of(self, prompt_ids: NDArray[np.int32]) -> bool:
        """Whether these are the prompt's first tokens: one memcmp, without a copy."""
        if self.num_tokens > len(prompt_ids):
            return False
        return self._ids == np.ascontiguousarray(prompt_ids[: self.num_tokens]).data

    def extend(self, turn: Turn) -> None:
        """The prompt's new tokens join masked out, the completion joins trainable."""
        old, num_drawn = self.num_tokens, len(turn.completion_ids)
        num_prompt = len(turn.prompt_ids) - old
        check_routes(turn, has_routes=self._routes is not None)
        if self._routes is not None:
            self._routes.append(new_routes(turn, old))
        self._ids += turn.prompt_ids[old:].tobytes()
        self._ids += turn.completion_ids.tobytes()
        self._spans.append(
            RowSpan(num_prompt, num_drawn, turn.logprobs, turn.versions, turn.temperature, turn.extra)
        )
        self.num_tokens += num_prompt + num_drawn

    def finish(self) -> Row:
        """The row as it is, its small columns laid out once. The last token has no route: nothing
        ever processed it."""
        count, routes = self.num_tokens, self._routes
        loss_mask, logprobs = np.zeros(count, np.uint8), np.zeros(count, np.float32)
        temperatures, versions = np.ones(count, np.float32), np.full(count, NOT_SAMPLED, np.int32)
        end = 0
        for span in self._spans:
            start, end = end + span.num_prompt, end + span.num_prompt + span.num_drawn
            loss_mask[start:end] = 1
            logprobs[start:end] = span.logprobs
            temperatures[start:end] = span.temperature
            versions[start:end] = span.versions
        drawn = [(span.num_prompt, span.num_drawn, span.extra) for span in self._spans]
        return Row(
            num_tokens=count,
            num_trainable=sum(span.num_drawn for span in self._spans),
            token_ids=(np.frombuffer(bytes(self._ids), np.int32),),
            loss_mask=(loss_mask,),
            logprobs=(logprobs,),
            temperatures=(temperatures,),
            versions=(versions,),
            routes=None if routes is None else (*routes, _no_route(routes)),
            extra={name: (column,) for name, column in laid_out(count, drawn).items()},
        )


def _no_route(routes: Sequence[Routes]) -> Routes:
    like = routes[-1]
    return np.zeros((1, *like.shape[1:]), like.dtype)
