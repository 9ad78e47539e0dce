"""The exceptions of rollway.

    RollwayError            shown to the user as one line: what, where, what to do next
    ├── ConfigError         a run file or an option is wrong
    ├── EnvironmentNotFound no environment has this name, module or file
    ├── EnvironmentInvalid  an environment was found and cannot be used
    ├── DatasetError        a data file or one of its rows cannot be used
    ├── ModelError          a model folder is missing or unusable
    ├── RunDirError         a run directory exists, or is not one
    ├── PortError           an address cannot be bound
    ├── KeysError           keys are missing, damaged, readable by others, or not accepted
    ├── PayloadError        a segment is missing, short or damaged, or cannot be written
    ├── TraceError          a turn does not fit its row (an engine's fault)
    ├── EngineError         an engine refused, or answered nonsense
    │   ├── EngineAway      it cannot be reached, hung up, or has old weights: it may come back
    │   └── EngineLate      it did not answer in time
    ├── ProtocolError       a message that does not belong to the protocol
    ├── RunStuck            a step can no longer complete
    ├── ToolFailed          a tool raised, and its toolset says that this fails the rollout
    ├── RolloutFailed       a rollout that was played in a test did not come to its end
    ├── AdvantageError      an advantage function of the user's failed
    └── PartDied            a process of the run ended when it should not
        LaneError           work in a process lane did not return
        ├── LaneFull        too many callers wait for the lane already
        ├── LaneClosed      the lane has ended
        ├── LaneTimeout     it passed its deadline and was killed
        ├── LaneCrashed     its process died
        └── LaneRaised      it raised; carries the remote traceback and its file:line

A failed rollout is not an exception but a record (`records.rollout.Failed`).
"""

import difflib
from collections.abc import Iterable

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding bytes of somebody else's may raise: not JSON or not of the right shape, not UTF-8, too
deeply nested."""


class RollwayError(Exception):
    """Base of what users are shown without a traceback."""


class ConfigError(RollwayError):
    pass


class EnvironmentNotFound(RollwayError):
    pass


class EnvironmentInvalid(RollwayError):
    pass


class DatasetError(RollwayError):
    pass


class ModelError(RollwayError):
    pass


class RunDirError(RollwayError):
    pass


class PortError(RollwayError):
    pass


class ToolFailed(RollwayError):
    pass


class RolloutFailed(RollwayError):
    def __init__(self, message: str, boundary: str, traceback: str) -> None:
        super().__init__(message)
        self.boundary = boundary
        self.traceback = traceback


class KeysError(RollwayError):
    pass


class PayloadError(RollwayError):
    pass


class TraceError(RollwayError):
    pass


class EngineError(RollwayError):
    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status with which the engine refused, or None if it failed in another way."""


class EngineAway(EngineError):
    def __init__(
        self, message: str, *, status: int | None = None, request_was_sent: bool = False
    ) -> None:
        super().__init__(message, status=status)
        self.request_was_sent = request_was_sent
        """True if the engine went away while it had this request to answer."""


class EngineLate(EngineError):
    pass


class ProtocolError(RollwayError):
    pass


class RunStuck(RollwayError):
    pass


class AdvantageError(RollwayError):
    pass


class PartDied(RollwayError):
    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
        """Its exit code, negative for a signal."""

    @property
    def was_killed(self) -> bool:
        return self.code < 0


class LaneError(RollwayError):
    pass


class LaneFull(LaneError):
    pass


class LaneClosed(LaneError):
    pass


class LaneTimeout(LaneError):
    pass


class LaneCrashed(LaneError):
    pass


class LaneRaised(LaneError):
    def __init__(self, message: str, traceback: str, where: str) -> None:
        super().__init__(message)
        self.traceback = traceback
        self.where = where


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of `known`, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
