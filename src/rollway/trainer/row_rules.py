"""Finds out why a row cannot be trained, so that one bad row is left out and does not end the run."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from msgspec import Struct

from ..errors import PayloadError
from ..model.packing import RowModel
from ..model.shape import find_repeats
from ..payload.blob import Columns
from ..payload.reader import SegmentReader
from ..records.batch import BatchRow, LeftOutRow
from ..records.turn import MINUS_INFINITY

PER_TOKEN = ("loss_mask", "logprobs", "temperatures")


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
        config = model.model.config.get_text_config()
        self._vocab_size: int = config.vocab_size
        self._num_layers: int = config.num_hidden_layers
        self._routers = model.routers if replays else []

    def expects_routes(self, reader: SegmentReader, rows: Sequence[BatchRow]) -> bool:
        """Return whether a row of a batch has routes: then a row without them is unlike the others."""
        for row in rows if self._routers else ():
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
        ids = columns["token_ids"]
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise PayloadError(
                f"token ids go from {ids.min()} to {ids.max()}, the vocabulary has {self._vocab_size}"
            )
        trained = columns["loss_mask"] != 0
        logprobs, temperatures = (
            columns["logprobs"][trained],
            columns["temperatures"][trained],
        )
        if not (np.isfinite(logprobs) & (logprobs > MINUS_INFINITY)).all():
            raise PayloadError("a logprob is minus infinity or not a number")
        if not (np.isfinite(temperatures) & (temperatures > 0)).all():
            raise PayloadError("a temperature is not a number above 0")
        if not np.isfinite(row.advantage):
            raise PayloadError(f"its advantage is {row.advantage}")
        if self._routers:
            self._check_routes(row, columns)

    def _check_routes(self, row: BatchRow, columns: Columns) -> None:
        router, routes = self._routers[0], columns.get("routes")
        if routes is None:
            return
        if routes.ndim != 3 or len(routes) != row.num_tokens:
            raise PayloadError(
                f"its routes are {list(routes.shape)} for {row.num_tokens} tokens"
            )
        _, num_layers, topk = routes.shape
        if num_layers not in (len(self._routers), self._num_layers) or topk != router.topk:
            raise PayloadError(
                f"its routes have {num_layers} layers × {topk} experts, but {len(self._routers)} of "
                f"the model's {self._num_layers} layers choose {router.topk} experts"
            )
        if (highest := int(routes.max(initial=0))) >= router.num_experts:
            raise PayloadError(
                f"its routes name expert {highest}, but the model has {router.num_experts}"
            )
        if topk > 1:
            known = routes[:-1]  # no engine reports what the last token would choose
            if num_layers != len(self._routers):
                known = known[:, [router.layer for router in self._routers]]
            if num_wrong := int(find_repeats(known).any(axis=1).sum()):
                raise PayloadError(f"its routes send {num_wrong} tokens to one expert twice")
