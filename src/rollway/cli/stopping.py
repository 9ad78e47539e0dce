"""How a command ends that is told to, by Ctrl-C or SIGTERM."""

import asyncio
import signal

import typer

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of a command ended by SIGINT and by SIGTERM, as shells know them."""
STOPPED = (KeyboardInterrupt, asyncio.CancelledError)
"""What comes out of a loop that was told to end."""


def cancel_on_sigterm() -> None:
    """From now on SIGTERM ends the running task like Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def exit_for(stopped: BaseException) -> typer.Exit:
    return typer.Exit(INTERRUPTED if isinstance(stopped, KeyboardInterrupt) else TERMINATED)
