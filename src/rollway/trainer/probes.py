"""Makes the probe of each version, by which engines are checked after they have loaded it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ..errors import PayloadError
from ..model.packing import RowModel
from ..model.scoring import TextScores, score_texts
from ..model.shape import parse_shape
from ..payload.reader import SegmentReader
from ..records.batch import BatchRow
from ..records.ids import PolicyVersion
from ..records.probe import CachedText, Probe, ProbeText

NUM_FIXED, NUM_RECENT = 8, 16
"""Random texts, which stay the same for the whole run, and texts out of recent rollouts."""
TEXT_TOKENS = 12
CACHED_TOKENS = 160
"""More than one block of any engine's prefix cache."""
RENEW_EVERY = 8
"""Versions after which texts of newer rollouts are taken. New texts have to be computed twice."""

Text = tuple[int, ...]


class ProbeMaker:
    """Computes probes with the model that is trained. Every text has the same length."""

    def __init__(self, rows: RowModel, dtype: str, *, has_cached_text: bool) -> None:
        config = rows.model.config.get_text_config()
        self._rows = rows
        self._dtype = dtype
        self._vocab_size = config.vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            config.vocab_size, (NUM_FIXED * TEXT_TOKENS + CACHED_TOKENS,), generator=generator
        )
        *fixed, cached = ids.split([TEXT_TOKENS] * NUM_FIXED + [CACHED_TOKENS])
        self._texts: list[Text] = [tuple(text.tolist()) for text in fixed]
        window = parse_shape(config.to_dict()).max_context or CACHED_TOKENS + 1
        self._cached = cached[: window - 1] if has_cached_text else None
        self._known: dict[Text, tuple[float, ...]] = {}
        """The logprobs of texts under the last version that was computed."""
        self._version: PolicyVersion | None = None
        self._renewed = -RENEW_EVERY

    def prepare(
        self, version: PolicyVersion, rows: Sequence[BatchRow], reader: SegmentReader
    ) -> None:
        """Choose the texts of the next probe, and compute them before `version` is trained further."""
        if version >= self._renewed + RENEW_EVERY:
            recent = islice(self._texts_of(rows, reader), NUM_RECENT)
            self._texts = [*self._texts[:NUM_FIXED], *recent]
            self._renewed = version
        missing = [text for text in self._texts if text not in self._known]
        if self._version != version:
            self._known, missing = {}, self._texts
        if missing:
            scores = self._score(missing)
            self._known |= zip(missing, _logprobs(scores), strict=True)
        self._version = version

    def make(self, version: PolicyVersion) -> Probe:
        """Return the probe of the weights that the model has now."""
        scores = self._score(self._texts)
        logprobs, routes = _logprobs(scores), _routes(scores, len(self._texts))
        texts = tuple(
            ProbeText(text, new, self._known.get(text, ()), experts)
            for text, new, experts in zip(self._texts, logprobs, routes, strict=True)
        )
        self._known = dict(zip(self._texts, logprobs, strict=True))
        self._version = version
        routers = self._rows.routers
        return Probe(
            version,
            self._dtype,
            texts,
            self._score_cached(),
            tuple(router.layer for router in routers),
            routers[0].topk if routers else 0,
        )

    def _score(self, texts: Sequence[Text]) -> TextScores:
        return score_texts(self._rows.model, self._rows.routers, torch.tensor(texts))

    def _score_cached(self) -> CachedText | None:
        if self._cached is None:
            return None
        scores = score_texts(self._rows.model, self._rows.routers, self._cached[None])
        return CachedText(tuple(self._cached.tolist()), float(scores.top_logprobs[0]))

    def _texts_of(self, rows: Sequence[BatchRow], reader: SegmentReader) -> Iterator[Text]:
        """Yield the last tokens of rows, which the policy has drawn. The trainer itself names rows that
        it cannot read, or whose tokens the model does not have."""
        for row in rows[:: max(1, len(rows) // NUM_RECENT)]:
            with suppress(PayloadError):
                ids = reader.row(row)["token_ids"][-TEXT_TOKENS:]
                if len(ids) == TEXT_TOKENS and 0 <= ids.min() <= ids.max() < self._vocab_size:
                    yield tuple(ids.tolist())


def _logprobs(scores: TextScores) -> list[tuple[float, ...]]:
    return [tuple(values) for values in scores.logprobs.tolist()]


def _routes(scores: TextScores, count: int) -> list[bytes]:
    routes: Tensor | None = scores.routes
    if routes is None:
        return [b""] * count
    return [experts.numpy().astype(np.uint16).tobytes() for experts in routes]
