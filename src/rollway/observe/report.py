"""The reports of the orchestrator to the process that started it, for people to see."""

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from ..records.lag import LagStats
from ..records.situation import CoreView
from ..records.text import sendable


class StepDone(Struct, frozen=True, tag="step_done"):
    """A step was trained: all its metrics, and the lag of every process during the step."""

    step: int
    metrics: dict[str, float]
    lags: dict[str, LagStats]


class EvalDone(Struct, frozen=True, tag="eval_done"):
    """An evaluation that began at `version` is over."""

    version: int
    metrics: dict[str, float]


class RunProgress(Struct, frozen=True, tag="progress"):
    """The state of the run, sent a few times a second."""

    core: CoreView


class Notice(Struct, frozen=True, tag="notice"):
    """A text that is shown as a line. It can be sent whatever it says: names of files need not be
    Unicode."""

    text: str

    def __post_init__(self) -> None:
        force_setattr(self, "text", sendable(self.text))


Report = StepDone | EvalDone | RunProgress | Notice
decode_report = msgspec.msgpack.Decoder(Report).decode
