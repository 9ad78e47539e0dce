"""Where steps are passed on to, besides `metrics.jsonl`."""

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """Takes the metrics of one step after the other, in order. May block for long."""

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Nothing follows: see that all of it arrives."""
