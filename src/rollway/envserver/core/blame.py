"""Whose fault the loss of a worker is. Pure.

A worker's board shows the rollout whose code was running. If the worker was silent, that rollout held
its loop. If it died, that rollout probably killed it: a crash is believed the second time, a SIGKILL,
which may have come from anywhere, the third.
"""

from ...records.rollout import Failed
from .events import WorkerDied, WorkerSilent
from .open_runs import OpenRun, serial_of

MAX_CRASHES = 2
MAX_KILLS = 3
MAX_ATTEMPTS = 10
"""A rollout that lost so many workers fails, even if nobody ever saw it do anything."""
HELD_SHARE = 0.5
"""A rollout that ran for less of the silence is not what silenced the worker."""

Loss = WorkerDied | WorkerSilent


def is_marked(entry: OpenRun, loss: Loss) -> bool:
    """Whether the board accuses this rollout."""
    mark = loss.mark
    if mark is None or mark.serial != serial_of(entry.key):
        return False
    match loss:
        case WorkerSilent(was_stopped=was_stopped, silent_s=silent_s):
            return not was_stopped and mark.held_s >= HELD_SHARE * silent_s
        case _:
            return True


def verdict(entry: OpenRun, loss: Loss) -> Failed | None:
    """The rollout's failure, or None if another worker may try it. Counts what it is blamed for."""
    if is_marked(entry, loss):
        match loss:
            case WorkerSilent():
                return Failed("env", _held(entry, loss))
            case WorkerDied(by_sigkill=True):
                entry.num_kills += 1
            case _:
                entry.num_crashes += 1
        if entry.num_crashes >= MAX_CRASHES or entry.num_crashes + entry.num_kills >= MAX_KILLS:
            return Failed("worker", _killed(entry, loss))
    if entry.run.attempt >= MAX_ATTEMPTS:
        return Failed(
            "worker", f"{entry.where}: its worker was lost {MAX_ATTEMPTS} times, last {loss.worker}"
        )
    return None


def _held(entry: OpenRun, loss: WorkerSilent) -> str:
    assert loss.mark is not None
    at = f" at {loss.mark.where}" if loss.mark.where else ""
    return (
        f"{entry.where}: it held the event loop of {loss.worker} for {loss.mark.held_s:.0f} s{at}, and "
        "the worker was killed; await what takes long, or move it to a plain reward"
    )


def _killed(entry: OpenRun, loss: Loss) -> str:
    assert loss.mark is not None
    at = f" at {loss.mark.where}" if loss.mark.where else ""
    count = entry.num_crashes + entry.num_kills
    how = loss.how if isinstance(loss, WorkerDied) else "was silent"
    return (
        f"{entry.where}: its code was running when its worker died, {count} times; last {loss.worker} "
        + (f"{how}{at}")
    )
