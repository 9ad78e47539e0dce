"""Turns what was raised while a rollout ran into a failure that says whose it is and where."""

import logging
import traceback
from pathlib import Path
from types import TracebackType

from ..errors import EngineError, LaneError, LaneRaised, LaneTimeout, RollwayError, TraceError
from ..loop.watch import stacks
from ..loop.watch.rarely import Rarely
from ..records.ids import RolloutId
from ..records.rollout import Boundary, Failed
from ..records.task import Task

MAX_ERROR, MAX_TRACEBACK = 500, 8_000
"""Characters of an error that travel with its record."""
OUR_CODE = str(Path(__file__).resolve().parent.parent)


def failed(task: Task, error: BaseException, boundary: Boundary) -> Failed:
    """The failure of user code at `boundary`, unless the error says that it is not the user's."""
    match error:
        case EngineError() | TraceError():
            return Failed("engine", short(error))
        case LaneRaised():
            return Failed(
                boundary, f"task '{task.id}': {short(error)}", error.traceback[-MAX_TRACEBACK:]
            )
        case LaneError():
            return Failed(boundary, f"task '{task.id}': {short(error)}")
    return Failed(boundary, f"task '{task.id}': {short(error)}", user_traceback(error))


def too_late(task: Task, error: Exception, limit_s: float) -> Failed:
    """The failure of a rollout that passed its deadline, with the line it was at."""
    if isinstance(error, LaneTimeout):
        return Failed("deadline", f"task '{task.id}': {short(error)}")
    cut_short = error.__cause__ or error
    where = stacks.find_user_line(stacks.from_traceback(cut_short.__traceback__)).where
    said = f"task '{task.id}' ran longer than {limit_s:g} s; it was at {where}"
    return Failed("deadline", said, user_traceback(cut_short))


def short(error: BaseException) -> str:
    """What went wrong, in a record's size."""
    text = str(error) if isinstance(error, RollwayError) else repr(error)
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…"


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(OUR_CODE):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))[-MAX_TRACEBACK:]


log = logging.getLogger(__name__)

IN_FULL = 10


class FailureLog:
    """The first failures of a boundary in full, then ever fewer: a log stays readable and bounded."""

    def __init__(self) -> None:
        self._seen: dict[str, Rarely] = {}

    def add(self, id: RolloutId, failed: Failed, whose: str) -> None:
        """`whose` says which attempt of what it was."""
        seen = self._seen.setdefault(failed.boundary, Rarely())
        is_worth_a_line = seen.add()
        if is_worth_a_line or seen.count <= IN_FULL:
            traceback = f"\n{failed.traceback}" if failed.traceback else ""
            log.warning(
                "%s failed: boundary %s (number %d), %s: %s%s",
                id, failed.boundary, seen.count, whose, failed.error, traceback,
            )  # fmt: skip
