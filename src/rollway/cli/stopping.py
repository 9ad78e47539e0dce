"""Ends a command that is stopped by Ctrl-C or SIGTERM."""

import asyncio
import signal

from typer import Exit

INTERRUPTED, TERMINATED = 130, 143
"""The exit codes that shells use for a command that SIGINT or SIGTERM ended."""
STOPPED = (KeyboardInterrupt, asyncio.CancelledError)
"""The exceptions that leave an event loop which was stopped."""


def cancel_on_sigterm() -> None:
    """Let SIGTERM cancel the running task from now on, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def exit_for(stopped: BaseException) -> Exit:
    return Exit(INTERRUPTED if isinstance(stopped, KeyboardInterrupt) else TERMINATED)
