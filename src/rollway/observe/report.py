"""What the orchestrator tells the process that started it, for people to see."""

import msgspec
from msgspec import Struct

from ..records.lag import LagStats
from ..records.situation import CoreView


class StepDone(Struct, frozen=True, tag="step_done"):
    """A step is trained: all its metrics, and the lag of every process during it."""

    step: int
    metrics: dict[str, float]
    lags: dict[str, LagStats]


class EvalDone(Struct, frozen=True, tag="eval_done"):
    """An evaluation is over; begun at `version`."""

    version: int
    metrics: dict[str, float]


class RunProgress(Struct, frozen=True, tag="progress"):
    """Where the run is, a few times a second."""

    core: CoreView


class Notice(Struct, frozen=True, tag="notice"):
    """Something worth a line of its own."""

    text: str


Report = StepDone | EvalDone | RunProgress | Notice
decode_report = msgspec.msgpack.Decoder(Report).decode
