"""Waits for a file to appear, woken by the kernel."""

import threading
from pathlib import Path

from watchfiles._rust_notify import RustNotify

from ..loop.lanes import thread

LOOK_AGAIN_MS = 1000
"""Look anyway this often: some network file systems never notify."""


async def appear(path: Path) -> None:
    """Return once `path` exists. Its parent's parent must exist."""
    watched = path.parent.parent
    stop = threading.Event()
    with RustNotify([str(watched)], False, False, 0, True, True) as watcher:
        try:
            while not await thread(path.exists):
                await thread(watcher.watch, 20, 10, LOOK_AGAIN_MS, stop)
        finally:
            stop.set()
