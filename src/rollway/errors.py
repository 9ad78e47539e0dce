"""The exceptions of rollway, drawn as they inherit. A test compares this drawing with the code.

    RollwayError                 shown to the user as one line: what happened, where, what to do next
    ├── ConfigError              a run file or an option is wrong
    ├── EnvironmentNotFound      no environment has this name, or it cannot be imported
    ├── EnvironmentInvalid       the environment was found and cannot be used
    ├── DatasetError             a data file, or a row of it, cannot be used
    ├── ModelError               a model folder is missing or unusable
    │   ├── GradientError        a batch gives a gradient that is not finite
    │   └── StateError           the trainer's saved state cannot be read
    ├── RunDirError              a run directory already exists, or a folder is not a run directory
    ├── PortError                an address cannot be bound
    ├── CurveKeysError           keys are missing, damaged, readable by others, or not accepted
    ├── PayloadError             a segment is missing, short or damaged, or cannot be written
    ├── TraceError               a turn does not fit its row (the engine's fault)
    ├── EngineError              an engine refused a request, or its answer makes no sense
    │   ├── EngineAway           it cannot be reached, hung up, or has old weights: it may come back
    │   ├── EngineLate           it did not answer in time
    │   ├── ReplyAborted         its reply is empty or cut off: asking again may help
    │   └── ContextFull          the prompt does not fit its context window
    ├── ProtocolError            a message does not belong to the protocol
    ├── RunStuck                 a step or an evaluation can no longer complete
    ├── CodeRefused              user code went on after it was told to end, and was left behind
    ├── ToolFailed               a tool raised, and its toolset says that this fails the rollout
    ├── RolloutFailed            a rollout that a test played failed
    ├── AdvantageError           the user's advantage function failed
    ├── PartDied                 a process of the run ended when it should not
    │   └── NeverReady           a worker ended before it was ready
    └── LaneError                a call in a process lane did not return
        ├── LaneFull             too many callers already wait for the lane
        ├── LaneClosed           the lane has ended
        ├── LaneTimeout          the call passed its deadline and was killed
        ├── LaneCrashed          the call's process died
        └── LaneRaised           the call raised; carries the error's class, traceback and file:line

These never reach the user:

    Exception
    ├── Stopped                  a stop condition or a limit ended a rollout, which is not an error
    └── BadRequest               a request cannot be answered by the embedded engine
    ConnectionError
    └── HttpError                a server cannot be reached, or does not speak HTTP
        └── HttpAway             it cannot be reached, or hung up
    BaseException
    ├── CodeQuit                 a rollout's code called sys.exit or raised KeyboardInterrupt in a task
    └── EndPlainCode             the worker wants blocking user code to end

A failed rollout is not an exception but a record (`records.rollout.Failed`).
"""

import difflib
from collections.abc import Iterable

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of decoding foreign bytes: not JSON, of the wrong shape, not UTF-8, or too deeply nested."""


class RollwayError(Exception):
    """The base of all errors that users see without a traceback."""


class ConfigError(RollwayError): ...


class EnvironmentNotFound(RollwayError): ...


class EnvironmentInvalid(RollwayError): ...


class DatasetError(RollwayError): ...


class ModelError(RollwayError): ...


class GradientError(ModelError):
    """A batch gives a gradient that is not finite. The model was not changed."""


class StateError(ModelError): ...


class RunDirError(RollwayError): ...


class PortError(RollwayError): ...


class ToolFailed(RollwayError): ...


class RolloutFailed(RollwayError):
    def __init__(self, message: str, boundary: str, traceback: str) -> None:
        super().__init__(message)
        self.boundary = boundary
        self.traceback = traceback


class CurveKeysError(RollwayError): ...


class PayloadError(RollwayError): ...


class TraceError(RollwayError): ...


class EngineError(RollwayError):
    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status with which the engine refused, or None if it failed in another way."""


class EngineAway(EngineError):
    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        request_was_sent: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status=status)
        self.request_was_sent = request_was_sent
        """True if the engine went away while it had this request to answer."""
        self.retry_after_s = retry_after_s
        """How long the engine asks to be left alone; None if it does not say."""


class EngineLate(EngineError): ...


class ReplyAborted(EngineError): ...


class ContextFull(EngineError): ...


class ProtocolError(RollwayError): ...


class RunStuck(RollwayError): ...


class AdvantageError(RollwayError): ...


class PartDied(RollwayError):
    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
        """The exit code of the process, negative for a signal."""

    @property
    def was_killed(self) -> bool:
        return self.code < 0


class CodeRefused(RollwayError):
    def __init__(self, problem: str, where: str) -> None:
        super().__init__(f"{problem}, at {where}" if where else problem)
        self.problem = problem
        self.where = where


class LaneError(RollwayError):
    def __init__(self, problem: str, *, where: str = "") -> None:
        super().__init__(f"{problem}, at {where}" if where else problem)
        self.problem = problem
        self.where = where
        """The line that the call was at, or that raised: `file:line in function`; empty if not known."""


class LaneFull(LaneError): ...


class LaneClosed(LaneError): ...


class LaneTimeout(LaneError): ...


class LaneCrashed(LaneError): ...


class LaneRaised(LaneError):
    def __init__(self, kind: str, text: str, *, traceback: str = "", where: str = "") -> None:
        RollwayError.__init__(self, f"{kind}: {text}" if kind else text)
        self.problem = str(self)
        self.kind = kind
        """The name of the exception's class, which this process may not know."""
        self.text = text
        self.traceback = traceback
        self.where = where


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'x'?` with the most similar of `names`, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean '{near[0]}'?" if near else ""


class CodeQuit(BaseException):
    def __init__(self, quitting: BaseException) -> None:
        super().__init__(f"{type(quitting).__name__}: {quitting}")
