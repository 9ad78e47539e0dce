"""`rollway why`: says what the current step of a run waits for."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Argument, Option, echo

from ..errors import UNREADABLE, RunDirError
from ..observe.why import lines
from ..records.situation import Situation
from ..records.text import one_line, visible_json
from ..rundir.rundir import RunDir

FRESH_S = 10.0


def why(
    run: Annotated[Path, Argument(help="The run directory: outputs/<name>.")],
    as_json: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what the current step of a run waits for: the oldest rollouts, their phase, worker and age.

    For a run that has ended, this is the state at its end.
    """
    directory = RunDir(run)
    now = read(directory)
    if as_json:
        echo(visible_json(msgspec.json.encode(now)))
        return
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now.time_s))
    if now.core.is_finished:
        echo(f"The run is complete: its {now.core.step - 1} steps were trained at {stamp}.")
        return
    old_s = time.time() - now.time_s
    is_alive = directory.is_locked
    if old_s > FRESH_S or not is_alive:
        alive = "is starting or ending, or its orchestrator hangs"
        state = alive if is_alive else "has ended"
        echo(f"The run {state}. State at {stamp}, {old_s:.0f} s ago:")
    for line in lines(now):
        echo(one_line(line))


def read(run: RunDir) -> Situation:
    if not run.exists:
        raise RunDirError(f"{run.path} is not a run directory")
    try:
        return msgspec.json.decode(run.now.read_bytes(), type=Situation)
    except FileNotFoundError:
        raise RunDirError(
            f"{run.path} has not begun: its orchestrator never started"
        ) from None
    except UNREADABLE as error:
        raise RunDirError(f"{run.now} cannot be read: {error}") from None
