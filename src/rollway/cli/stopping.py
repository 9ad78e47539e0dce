"""Ends a command that is stopped by Ctrl-C or SIGTERM, or by an error."""

import asyncio
import signal

from typer import Exit

from ..errors import RollwayError
from ..loop.processes.part import first_cause
from ..records.text import visible

INTERRUPTED, TERMINATED = 130, 143
"""The exit codes that shells use for a command that SIGINT or SIGTERM ended."""
STOPPED = (KeyboardInterrupt, asyncio.CancelledError)
"""The exceptions that leave an event loop which was stopped."""


def cancel_on_sigterm() -> None:
    """Let SIGTERM cancel the running task from now on, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def explain(error: BaseException) -> str | None:
    """Return an error that the user can do something about as one line, and None for a bug."""
    cause = first_cause(error)
    if isinstance(cause, RollwayError):
        return visible(str(cause))
    if isinstance(cause, OSError) and cause.filename is not None:
        return visible(f"cannot use {cause.filename}: {cause.strerror}")
    return None


def exit_for(stopped: BaseException) -> Exit:
    return Exit(INTERRUPTED if isinstance(stopped, KeyboardInterrupt) else TERMINATED)
