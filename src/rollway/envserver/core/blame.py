"""Decides which rollout is to blame for the loss of a worker. Pure.

A worker's board shows the rollout whose code was running. If the worker was silent, that rollout held
its event loop and fails. If the worker died, that rollout probably killed it. It fails after its
second crash, or after three lost workers if SIGKILL, which may come from anywhere, ended some of them.

If the board shows nothing, the rollouts of the dead worker run beside fewer others with each such loss.
The one that still loses its worker when it runs alone is to blame.
"""

from collections.abc import Sequence

from ...records.rollout import Failed
from .events import WorkerDied, WorkerSilent
from .open_runs import OpenRun

MAX_CRASHES = 2
MAX_KILLS = 3
MAX_ATTEMPTS = 10
"""A rollout that has lost this many workers fails, even if its code was never seen running."""
HELD_SHARE = 0.5
"""Code that ran for a smaller share of the silence is not the reason why the worker was silent."""

Loss = WorkerDied | WorkerSilent


def is_marked(run: OpenRun, loss: Loss) -> bool:
    """Return whether the board accuses this rollout."""
    mark = loss.mark
    if mark is None or mark.serial != run.message.serial:
        return False
    if isinstance(loss, WorkerSilent):
        return not loss.was_stopped and mark.held_s >= HELD_SHARE * loss.silent_s
    return True


def find_accused(lost: Sequence[OpenRun], loss: Loss) -> list[OpenRun]:
    """Return the rollout that the board shows. Without one, a rollout that ran alone is to blame for the
    death of its worker, and so is a group that did."""
    marked = [run for run in lost if is_marked(run, loss)]
    if marked or isinstance(loss, WorkerSilent):
        return marked
    is_alone = len({(run.client, run.unit) for run in lost}) == 1
    return list(lost) if is_alone else []


def verdict(run: OpenRun, loss: Loss, accused: Sequence[OpenRun]) -> Failed | None:
    """Count what a rollout is blamed for. Return its failure, or None if another worker may try it."""
    if isinstance(loss, WorkerDied) and not accused:
        run.num_losses += 1
    if run in accused:
        match loss:
            case WorkerSilent():
                return Failed("env", _explain_held(loss), where=_line(loss))
            case WorkerDied(by_sigkill=True):
                run.num_kills += 1
            case _:
                run.num_crashes += 1
        num_blamed = run.num_crashes + run.num_kills
        if run.num_crashes >= MAX_CRASHES or num_blamed >= MAX_KILLS:
            return Failed("worker", _explain_killed(loss, num_blamed), where=_line(loss))
    if run.message.attempt >= MAX_ATTEMPTS:
        return Failed(
            "worker", f"its worker was lost {MAX_ATTEMPTS} times, last {loss.worker}"
        )
    return None


def describe_loss(loss: Loss, accused: Sequence[OpenRun]) -> str:
    """Say why a worker is gone, in words that follow its name."""
    line = f" at {_line(loss)}" if _line(loss) else ""
    where = accused[0].where if accused else ""
    if isinstance(loss, WorkerDied):
        return f"{loss.how} while {where} was running{line}" if accused else loss.how
    silent = f"was silent for {loss.silent_s:.0f} s and was killed"
    if loss.was_stopped:
        return f"{silent}: its process had been stopped from outside"
    return f"{silent}: {where} held its event loop{line}" if accused else silent


def _line(loss: Loss) -> str:
    return loss.mark.where if loss.mark else ""


def _explain_held(loss: WorkerSilent) -> str:
    assert loss.mark is not None
    return (
        f"it held the event loop of {loss.worker} for {loss.mark.held_s:.0f} s, and the worker was "
        "killed; await what takes long, or move it to a plain reward"
    )


def _explain_killed(loss: Loss, num_blamed: int) -> str:
    how = loss.how if isinstance(loss, WorkerDied) else "was silent"
    running = "its code was running" if loss.mark else "no other rollout was running"
    return f"{running} when its worker died, {num_blamed} times; last {loss.worker} {how}"
