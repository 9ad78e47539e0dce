"""A rollout's rows, grown turn by turn as replies arrive."""

from ..errors import TraceError
from ..records.turn import Ints, Turn
from .extra import check_extra
from .routes import wanted_start
from .row import OpenRow, Row


class Trace:
    """All rows of one rollout. A turn extends the longest row that is a prefix of its prompt."""

    def __init__(self) -> None:
        self._rows: list[OpenRow] = []
        self.num_turns = 0
        self.num_sampled = 0

    def routes_start(self, prompt_ids: Ints) -> int:
        """From which position to ask the engine for routes, before the request is sent."""
        row = self._longest_prefix(prompt_ids)
        return wanted_start(row.num_tokens) if row else 0

    def add(self, turn: Turn) -> None:
        """Take a turn in. Raises TraceError if the engine's reply cannot be right."""
        if not len(turn.logprobs) == len(turn.versions) == len(turn.completion_ids):
            raise TraceError(
                f"{len(turn.completion_ids)} reply tokens came with {len(turn.logprobs)} logprobs "
                f"and {len(turn.versions)} versions"
            )
        check_extra(turn)
        row = self._longest_prefix(turn.prompt_ids)
        wanted = wanted_start(row.num_tokens) if row else 0
        if turn.routes is not None and turn.routes_start > wanted:
            raise TraceError(f"routes start at {turn.routes_start}, the row needs them from {wanted}")
        if row is None:
            self._rows.append(OpenRow(turn))
        else:
            row.extend(turn)
        self.num_turns += 1
        self.num_sampled += len(turn.completion_ids)

    def finish(self) -> tuple[Row, ...]:
        return tuple(row.finish() for row in self._rows)

    def _longest_prefix(self, prompt_ids: Ints) -> OpenRow | None:
        matching = [row for row in self._rows if row.is_prefix_of(prompt_ids)]
        return max(matching, key=lambda row: row.num_tokens, default=None)
