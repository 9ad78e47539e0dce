"""A row: one token sequence the trainer sees, as columns."""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..records.ids import PolicyVersion
from ..records.rollout import RowSummary
from ..records.turn import Floats, Ints, Routes, SpooledRoutes, Turn
from .detect import detect
from .routes import RouteChunk, check_routes, new_routes

NOT_SAMPLED = -1
"""The version of a token that no policy sampled."""


class Row(Struct, frozen=True):
    """A finished row. Every column has `num_tokens` entries; `routes` come in chunks, one per turn."""

    num_tokens: int
    num_trainable: int
    token_ids: Ints
    loss_mask: NDArray[np.uint8]
    logprobs: Floats
    temperatures: Floats
    versions: Ints
    routes: tuple[Routes | SpooledRoutes, ...] | None
    engine: str = ""
    """The engine that drew its tokens; empty if there were several."""
    is_approximate: bool = False
    """One of its turns is."""

    def summary(self) -> RowSummary:
        """Return the row's sizes and the signs of broken text in its sampled tokens."""
        sampled = self.loss_mask.astype(bool)
        detected = detect(self.token_ids[sampled], self.logprobs[sampled])
        versions = self.versions[sampled]
        is_one = len(versions) > 0 and versions.min() == versions.max()
        version = PolicyVersion(int(versions[0])) if is_one else None
        return RowSummary(
            self.num_tokens,
            self.num_trainable,
            detected,
            self.engine,
            version,
            self.is_approximate,
        )

    def columns(self) -> dict[str, tuple[NDArray[np.generic] | SpooledRoutes, ...]]:
        """Return the chunks of each column, by the name the column is stored under."""
        columns: dict[str, tuple[NDArray[np.generic] | SpooledRoutes, ...]] = {
            "token_ids": (self.token_ids,),
            "logprobs": (self.logprobs,),
            "temperatures": (self.temperatures,),
            "versions": (self.versions,),
            "loss_mask": (self.loss_mask,),
        }
        if self.routes is not None:
            columns["routes"] = self.routes
        return columns


class RowSpan(Struct, frozen=True):
    """The tokens one turn added to a row: the prompt's new tokens, then the sampled ones."""

    num_prompt: int
    num_sampled: int
    logprobs: Floats
    versions: Ints
    temperature: float
    engine: str
    is_approximate: bool


class OpenRow:
    """A row that may still grow. It holds each token once, however many turns there are."""

    def __init__(self, turn: Turn) -> None:
        self._ids = bytearray()
        self._spans: list[RowSpan] = []
        self._routes: list[RouteChunk] | None = None if turn.routes is None else []
        self._is_closed = False
        self.num_tokens = 0
        self.extend(turn)

    def is_prefix_of(self, prompt_ids: Ints) -> bool:
        """Return whether the prompt begins with this row's tokens: one memcmp, without a copy."""
        if self.num_tokens > len(prompt_ids):
            return False
        return self._ids == np.ascontiguousarray(prompt_ids[: self.num_tokens]).data

    def extend(self, turn: Turn) -> None:
        """Add the prompt's new tokens with the loss masked out, then the completion as trainable."""
        num_before, num_sampled = self.num_tokens, len(turn.completion_ids)
        num_prompt = len(turn.prompt_ids) - num_before
        check_routes(turn, has_routes=self._routes is not None)
        if self._routes is not None:
            self._routes.append(RouteChunk(new_routes(turn, num_before)))
        self._ids += turn.prompt_ids[num_before:].tobytes()
        self._ids += turn.completion_ids.tobytes()
        columns = turn.logprobs, turn.versions, turn.temperature, turn.engine
        span = RowSpan(num_prompt, num_sampled, *columns, turn.is_approximate)
        self._spans.append(span)
        self.num_tokens += num_prompt + num_sampled

    @property
    def last_routes(self) -> RouteChunk | None:
        return self._routes[-1] if self._routes else None

    def close(self) -> None:
        """Add the last token's route. It is zero: the engine never processed that token."""
        if self._routes and not self._is_closed:
            last = self._routes[-1].routes
            _, *grid = last.shape
            self._routes.append(RouteChunk(np.zeros((1, *grid), last.dtype)))
            self._is_closed = True

    def reopen(self) -> RouteChunk | None:
        """Take back the last token's route if it was added: the next turn brings it."""
        if not self._routes or not self._is_closed:
            return None
        self._is_closed = False
        return self._routes.pop()

    def finish(self) -> Row:
        """Lay out the columns."""
        self.close()
        count, routes = self.num_tokens, self._routes
        loss_mask, logprobs = np.zeros(count, np.uint8), np.zeros(count, np.float32)
        temperatures, versions = (
            np.ones(count, np.float32),
            np.full(count, NOT_SAMPLED, np.int32),
        )
        end, engines = 0, {span.engine for span in self._spans}
        for span in self._spans:
            start, end = end + span.num_prompt, end + span.num_prompt + span.num_sampled
            loss_mask[start:end] = 1
            logprobs[start:end] = span.logprobs
            temperatures[start:end] = span.temperature
            versions[start:end] = span.versions
        return Row(
            num_tokens=count,
            num_trainable=sum(span.num_sampled for span in self._spans),
            token_ids=np.frombuffer(bytes(self._ids), np.int32),
            loss_mask=loss_mask,
            logprobs=logprobs,
            temperatures=temperatures,
            versions=versions,
            routes=tuple(chunk.routes for chunk in routes) if routes else None,
            engine=engines.pop() if len(engines) == 1 else "",
            is_approximate=any(span.is_approximate for span in self._spans),
        )
