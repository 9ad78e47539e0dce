"""Whom a CancelledError is meant for."""

import asyncio


def is_cancelled() -> bool:
    """Whether the running task is being cancelled, rather than something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
