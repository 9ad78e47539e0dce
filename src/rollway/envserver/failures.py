"""Turns what was raised while a rollout ran into a failure with its boundary and its line."""

import asyncio
import logging
import traceback
from pathlib import Path
from types import TracebackType

from ..errors import (
    CodeQuit,
    EngineError,
    LaneError,
    LaneRaised,
    LaneTimeout,
    RollwayError,
    TraceError,
)
from ..loop.coroutines import is_cancelled
from ..loop.watch import stacks
from ..loop.watch.rarely import Rarely
from ..records.ids import RolloutId
from ..records.rollout import Boundary, Failed
from ..records.text import sendable

MAX_ERROR, MAX_TRACEBACK = 500, 8_000
"""Characters of an error that travel with its record."""
OUR_CODE = str(Path(__file__).resolve().parent.parent)


def failed(error: BaseException, boundary: Boundary) -> Failed:
    """Return a failure at `boundary`, unless the error shows that the engine is to blame. If the error
    cancels the running task, raise it again."""
    if isinstance(error, CodeQuit) and error.__cause__ is not None:
        error = error.__cause__
    text = short(error)
    match error:
        case EngineError() | TraceError():
            return Failed("engine", text)
        case LaneRaised():
            traceback = sendable(error.traceback[-MAX_TRACEBACK:])
            return Failed(boundary, text, traceback, sendable(error.where))
        case LaneError():
            return Failed(boundary, cut(error.problem), where=error.where)
        case asyncio.CancelledError() if is_cancelled():
            raise error
    return Failed(boundary, text, user_traceback(error), stacks.where_raised(error))


def too_late(error: BaseException, limit_s: float) -> Failed:
    """Return the failure of a rollout that passed its deadline, with the line it was at."""
    if isinstance(error, LaneTimeout):
        return Failed("deadline", cut(error.problem), where=error.where)
    cut_short = error.__cause__ or error
    where = str(stacks.find_user_line(stacks.from_error(cut_short)))
    text = f"the rollout ran longer than {limit_s:g} s"
    return Failed("deadline", text, user_traceback(cut_short), where)


def short(error: BaseException) -> str:
    """Return what went wrong, cut to the size of a record."""
    return cut(str(error) if isinstance(error, RollwayError) else _described(error))


def cut(text: str) -> str:
    return sendable(text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…")


def _described(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as failure:  # code of the user's class
        text = f"(its text cannot be read: {type(failure).__name__})"
    return f"{name}: {text}" if text else name


def user_traceback(error: BaseException) -> str:
    """Return the traceback from the user's first frame on."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(OUR_CODE):
        frame = frame.tb_next
    lines = traceback.format_exception(type(error), error, frame)
    return sendable("".join(lines)[-MAX_TRACEBACK:])


log = logging.getLogger(__name__)

IN_FULL = 10
"""Failures of one boundary that are all logged. Later ones are logged more rarely."""


class FailureLog:
    """Logs failures by boundary: first all of them, then fewer, so that the log stays readable."""

    def __init__(self) -> None:
        self._seen: dict[str, Rarely] = {}

    def add(self, rollout_id: RolloutId, failed: Failed, origin: str) -> None:
        """Log a failure. `origin` names the environment, the task and the attempt."""
        seen = self._seen.setdefault(failed.boundary, Rarely())
        if seen.add() or seen.count <= IN_FULL:
            traceback = f"\n{failed.traceback}" if failed.traceback else ""
            log.warning(
                "%s failed: boundary %s (number %d), %s: %s%s",
                rollout_id, failed.boundary, seen.count, origin, failed.text, traceback,
            )  # fmt: skip
