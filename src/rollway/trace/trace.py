"""A rollout's rows, grown turn by turn as replies arrive."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import TraceError
from ..records.turn import Ints, Turn
from .extra import check_extra
from .routes import wanted_start
from .row import OpenRow, Row


class RowPlace:
    """Where a turn will go: the row it extends, or a new one."""

    def __init__(self, row: OpenRow | None) -> None:
        self.row = row
        self.routes_start = wanted_start(row.num_tokens) if row else 0
        """From which position to ask the engine for routes."""


class Trace:
    """All rows of one rollout. A turn extends the longest row that is a prefix of its prompt.

    Which one is settled before the engine is asked, and holds while it answers: conversations that go
    on at the same time never extend a row that another is about to extend.
    """

    def __init__(self) -> None:
        self._rows: list[OpenRow] = []
        self._taken: list[OpenRow] = []

    @contextmanager
    def place_for(self, prompt_ids: Ints) -> Iterator[RowPlace]:
        """The place of a turn, kept free for it within the block."""
        place = RowPlace(self._longest_prefix(prompt_ids))
        if place.row is None:
            yield place
            return
        self._taken.append(place.row)
        try:
            yield place
        finally:
            self._taken.remove(place.row)

    def add(self, turn: Turn, place: RowPlace | None = None) -> None:
        """Take a turn in. Raises TraceError if the engine's reply cannot be right."""
        if not len(turn.logprobs) == len(turn.versions) == len(turn.completion_ids):
            raise TraceError(
                f"{len(turn.completion_ids)} reply tokens came with {len(turn.logprobs)} logprobs "
                f"and {len(turn.versions)} versions"
            )
        check_extra(turn)
        place = place or RowPlace(self._longest_prefix(turn.prompt_ids))
        if turn.routes is not None and turn.routes_start > place.routes_start:
            raise TraceError(
                f"routes start at {turn.routes_start}, the row needs them from {place.routes_start}"
            )
        if place.row is None:
            self._rows.append(OpenRow(turn))
        else:
            place.row.extend(turn)

    def finish(self) -> tuple[Row, ...]:
        return tuple(row.finish() for row in self._rows)

    def _longest_prefix(self, prompt_ids: Ints) -> OpenRow | None:
        free = [row for row in self._rows if not any(row is one for one in self._taken)]
        matching = [row for row in free if row.is_prefix_of(prompt_ids)]
        return max(matching, key=lambda row: row.num_tokens, default=None)
