"""Finds out why a row cannot be trained, so that one bad row is left out and does not end the run."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ..errors import PayloadError
from ..model.packing import RowModel
from ..model.shape import parse_shape
from ..payload.blob import Columns
from ..payload.reader import SegmentReader
from ..records.batch import BatchRow, LeftOutRow
from ..records.turn import MINUS_INFINITY, Routes

PER_TOKEN = ("loss_mask", "logprobs", "temperatures")
MIN_TEMPERATURE = 1e-6
"""Logits that are divided by less would not be finite."""
NO_ROUTES = (
    "it has no routes, though other rows have: run every 'rollway serve' with the same --routes as the "
    "run file's engine.routes"
)


class UsableRow(Struct, frozen=True):
    """A row of a batch with its columns, which the model can take."""

    row: BatchRow
    columns: Columns

    def left_out(self, reason: str) -> LeftOutRow:
        return LeftOutRow(self.row.rollout_id, self.row.row, reason)


class RowRules:
    """What a model can take: its vocabulary, and the layers and experts of its routers."""

    def __init__(self, model: RowModel, *, replays: bool) -> None:
        config, routers = model.model.config.get_text_config(), model.routers
        shape = replace(parse_shape(config.to_dict()), vocab_size=config.vocab_size)
        self._replays = replays and bool(routers)
        if self._replays:
            shape = replace(
                shape,
                num_experts=routers[0].num_experts,
                topk=routers[0].topk,
                moe_layers=tuple(router.layer for router in routers),
            )
        self._shape = shape

    def expects_routes(self, reader: SegmentReader, rows: Sequence[BatchRow]) -> bool:
        """Return whether a row of a batch has routes: then a row without them is unlike the others."""
        for row in rows if self._replays else ():
            with suppress(PayloadError):
                if "routes" in reader.row(row):
                    return True
        return False

    def load(
        self, reader: SegmentReader, rows: Sequence[BatchRow], *, expects_routes: bool
    ) -> tuple[list[UsableRow], list[LeftOutRow]]:
        """Return the rows that can be trained with their columns, and the others with the reason."""
        usable, left_out = [], []
        for row in rows:
            try:
                columns = reader.row(row)
                self._check(row, columns)
                if expects_routes and "routes" not in columns:
                    raise PayloadError(NO_ROUTES)
            except PayloadError as error:
                left_out.append(LeftOutRow(row.rollout_id, row.row, str(error)))
            else:
                usable.append(UsableRow(row, columns))
        return usable, left_out

    def _check(self, row: BatchRow, columns: Columns) -> None:
        """Raise PayloadError with what is wrong."""
        for name in PER_TOKEN:
            if len(columns.get(name, ())) != row.num_tokens:
                raise PayloadError(f"column '{name}' does not have {row.num_tokens} entries")
        ids, shape = columns["token_ids"], self._shape
        if ids.min() < 0 or ids.max() >= shape.vocab_size:
            raise PayloadError(
                f"token ids go from {ids.min()} to {ids.max()}, the vocabulary has {shape.vocab_size}"
            )
        if shape.max_context and row.num_tokens > shape.max_context:
            raise PayloadError(
                f"it has {row.num_tokens} tokens, but the model takes up to {shape.max_context}"
            )
        trained = columns["loss_mask"] != 0
        logprobs, temperatures = (
            columns["logprobs"][trained],
            columns["temperatures"][trained],
        )
        if not (np.isfinite(logprobs) & (logprobs > MINUS_INFINITY)).all():
            raise PayloadError("a logprob is minus infinity or not a number")
        if not (np.isfinite(temperatures) & (temperatures > MIN_TEMPERATURE)).all():
            raise PayloadError("a temperature is not a number above 0")
        if not np.isfinite(row.advantage):
            raise PayloadError(f"its advantage is {row.advantage}")
        if self._replays and "routes" in columns:
            self._check_routes(row, columns["routes"])

    def _check_routes(self, row: BatchRow, routes: Routes) -> None:
        if routes.ndim != 3 or len(routes) != row.num_tokens:
            raise PayloadError(
                f"its routes are {list(routes.shape)} for {row.num_tokens} tokens"
            )
        if why := self._shape.why_not(routes, int(routes.max(initial=0))):
            raise PayloadError(f"its routes {why}")
        # no engine reports what the last token would choose
        if num_wrong := self._shape.count_repeats(routes[:-1]):
            raise PayloadError(f"its routes send {num_wrong} tokens to one expert twice")
