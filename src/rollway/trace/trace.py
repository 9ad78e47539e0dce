"""A rollout's rows, which grow turn by turn as replies arrive."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import TraceError
from ..records.turn import Ints, SpooledRoutes, Turn
from .routes import RouteChunk, first_position
from .row import OpenRow, Row


class RowPlace:
    """The place of a turn: the row it extends, or None for a new row."""

    def __init__(self, row: OpenRow | None) -> None:
        self.row = row
        self.routes_start = first_position(row.num_tokens) if row else 0
        """The first position whose routes the engine has to return."""


class Trace:
    """All rows of one rollout. A turn extends the longest row that is a prefix of its prompt. That row
    is chosen before the engine is asked, and it is reserved while the engine answers. So two
    conversations that run at the same time never extend the same row."""

    def __init__(self) -> None:
        self._rows: list[OpenRow] = []
        self._route_format: tuple[np.dtype[Any], tuple[int, ...]] | None = None
        self._reserved: set[OpenRow | None] = set()
        self._loose: list[RouteChunk] = []
        """The routes that are in memory, in the order of their turns."""
        self._last: OpenRow | None = None
        """The row of the last turn."""
        self.num_loose_bytes = 0

    @contextmanager
    def place_for(self, prompt_ids: Ints) -> Iterator[RowPlace]:
        """Yield the place of a turn with this prompt, reserved until the block ends."""
        place = RowPlace(self._longest_prefix(prompt_ids))
        self._reserved.add(place.row)
        try:
            yield place
        finally:
            self._reserved.discard(place.row)

    def add(self, turn: Turn, place: RowPlace | None = None) -> None:
        """Add a turn to its row. Raise TraceError if the engine's reply cannot be right."""
        num_tokens, num_logprobs = len(turn.completion_ids), len(turn.logprobs)
        if not num_tokens == num_logprobs == len(turn.versions):
            raise TraceError(
                f"the engine's reply has {num_tokens} tokens, {num_logprobs} logprobs and "
                f"{len(turn.versions)} versions; these numbers must be equal"
            )
        place = place or RowPlace(self._longest_prefix(turn.prompt_ids))
        if turn.routes is not None and turn.routes_start > place.routes_start:
            raise TraceError(
                f"the engine's routes start at position {turn.routes_start}, but the row needs them "
                f"from position {place.routes_start}"
            )
        self._check_route_format(turn)
        row = self._extend(turn, place.row)
        if self._last not in (None, row):
            self._last.close()
            self._hold(self._last)
        self._hold(row)
        self._last = row

    def _extend(self, turn: Turn, row: OpenRow | None) -> OpenRow:
        if row is None:
            self._rows.append(row := OpenRow(turn))
            return row
        taken_back = row.reopen()
        if taken_back in self._loose:
            self._loose.remove(taken_back)
            self.num_loose_bytes -= taken_back.routes.nbytes
        row.extend(turn)
        return row

    def _hold(self, row: OpenRow) -> None:
        """Count the last routes of a row as in memory."""
        if (chunk := row.last_routes) is not None:
            self._loose.append(chunk)
            self.num_loose_bytes += chunk.routes.nbytes

    def loose_routes(self) -> list[RouteChunk]:
        """Return the routes that are in memory, in the order of their turns. Where another row follows,
        a row's last route, of zeros, is among them, so that rows lie one behind the other in a file."""
        return list(self._loose)

    def spooled(self, chunks: Sequence[RouteChunk], places: Sequence[SpooledRoutes]) -> None:
        """A file holds these routes, at these places: forget them. Meanwhile turns may have been added,
        or a last route taken back."""
        for chunk, place in zip(chunks, places, strict=True):
            if chunk in self._loose:
                self.num_loose_bytes -= chunk.routes.nbytes
                self._loose.remove(chunk)
            chunk.routes = place

    def _check_route_format(self, turn: Turn) -> None:
        """Raise TraceError if the routes have another dtype or shape than earlier in the rollout."""
        if turn.routes is None:
            return
        found = turn.routes.dtype, turn.routes.shape[1:]
        if self._route_format not in (None, found):
            now, before = (
                f"{kind}{list(shape)}" for kind, shape in (found, self._route_format)
            )
            raise TraceError(
                f"the engine's routes are {now} a token, but were {before} before"
            )
        self._route_format = found

    def finish(self) -> tuple[Row, ...]:
        return tuple(row.finish() for row in self._rows)

    def finish_in_slices(self) -> Generator[None, None, tuple[Row, ...]]:
        """Do the same, and yield after each row: there may be hundreds."""
        rows = []
        for row in self._rows:
            rows.append(row.finish())
            yield
        return tuple(rows)

    def _longest_prefix(self, prompt_ids: Ints) -> OpenRow | None:
        free = [row for row in self._rows if row not in self._reserved]
        matching = [row for row in free if row.is_prefix_of(prompt_ids)]
        return max(matching, key=lambda row: row.num_tokens, default=None)
