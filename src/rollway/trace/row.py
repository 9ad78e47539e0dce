"""A row: one token sequence the trainer sees, as columns still in the pieces they arrived in."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..records.rollout import RowSummary
from ..records.turn import Routes, Turn
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

    @property
    def summary(self) -> RowSummary:
        return RowSummary(self.num_tokens, self.num_trainable)

    def columns(self) -> dict[str, Chunks]:
        """The columns that exist, by the name they are stored under."""
        columns = {
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "temperatures": self.temperatures,
            "versions": self.versions,
            "loss_mask": self.loss_mask,
        }
        return columns if self.routes is None else {**columns, "routes": self.routes}


class OpenRow:
    """A row that may still grow. Holds each token once, whatever the number of turns."""

    def __init__(self, turn: Turn) -> None:
        self._ids = bytearray()
        self._chunks: dict[str, list[NDArray[np.generic]]] = {
            name: [] for name in ("loss_mask", "logprobs", "temperatures", "versions")
        }
        self._routes: list[Routes] | None = None if turn.routes is None else []
        self.num_tokens = 0
        self._num_trainable = 0
        self.extend(turn)

    def is_prefix_of(self, prompt_ids: NDArray[np.int32]) -> bool:
        """Whether these are the prompt's first tokens: one memcmp."""
        if self.num_tokens > len(prompt_ids):
            return False
        head = prompt_ids[: self.num_tokens].data.cast("B")
        return memoryview(self._ids) == head

    def extend(self, turn: Turn) -> None:
        """The prompt's new tokens join masked out, the completion joins trainable."""
        old, num_new = self.num_tokens, len(turn.completion_ids)
        num_prompt = len(turn.prompt_ids) - old
        check_routes(turn, has_routes=self._routes is not None)
        if self._routes is not None:
            self._routes.append(new_routes(turn, old))
        self._ids += turn.prompt_ids[old:].tobytes()
        self._ids += turn.completion_ids.tobytes()
        self._add("loss_mask", np.uint8, num_prompt, 0, np.ones(num_new, np.uint8))
        self._add("logprobs", np.float32, num_prompt, 0, turn.logprobs)
        temperatures = np.full(num_new, turn.temperature, np.float32)
        self._add("temperatures", np.float32, num_prompt, 1, temperatures)
        self._add("versions", np.int32, num_prompt, NOT_SAMPLED, turn.versions)
        self.num_tokens += num_prompt + num_new
        self._num_trainable += num_new

    def _add(
        self, name: str, dtype: type[np.generic], num_prompt: int, fill: int,
        sampled: NDArray[np.generic],
    ) -> None:  # fmt: skip
        self._chunks[name] += [np.full(num_prompt, fill, dtype), sampled]

    def finish(self) -> Row:
        """The row as it is. The last token has no route: nothing ever processed it."""
        routes = self._routes
        return Row(
            num_tokens=self.num_tokens,
            num_trainable=self._num_trainable,
            token_ids=(np.frombuffer(bytes(self._ids), np.int32),),
            routes=None if routes is None else (*routes, _no_route(routes)),
            **{name: tuple(chunks) for name, chunks in self._chunks.items()},
        )


def _no_route(routes: Sequence[Routes]) -> Routes:
    like = routes[-1]
    return np.zeros((1, *like.shape[1:]), like.dtype)
