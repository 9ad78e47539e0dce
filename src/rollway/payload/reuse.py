"""Reuses the files of released segments for new ones. Everything here blocks.

Removing a file gives all its memory back at once, and a new file takes as much page by page. On a
virtual machine, which hands free memory to its host, that holds up every process for up to 200 ms, and
it costs a worker a tenth of its CPU. So a payload folder keeps its largest size until its run ends.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from ..errors import PayloadError
from .lock import open_exclusively

SPARES = "spares"
"""The folder of spare files within the payload folder. There may be thousands of other files."""
SPOOL = ".spool"
"""Ends the name of a file with the routes of a running rollout."""


def make_spare(path: Path) -> None:
    """Turn the file of an unused segment into a spare one. Remove it if a process still has views."""
    try:
        with open_exclusively(path, os.O_RDONLY):
            spares = path.parent / SPARES
            spares.mkdir(mode=0o700, exist_ok=True)
            path.rename(spares / path.name)
    except (PayloadError, OSError):
        path.unlink(missing_ok=True)


def take_spare(path: Path) -> bool:
    """Rename a spare file to `path`, with the bytes it holds. Return False if there is none."""
    with suppress(FileNotFoundError), os.scandir(path.parent / SPARES) as found:
        for spare in found:
            if os.access(spare, os.W_OK):
                with suppress(FileNotFoundError):  # another writer was faster
                    os.rename(spare, path)
                    return True
    return False


def remove_spares(folder: Path) -> None:
    """Give back the space of spare files, and of spools that killed workers left, when nothing is
    written here for a while."""
    for spool in folder.glob(f"*{SPOOL}"):
        spool.unlink(missing_ok=True)
    shutil.rmtree(folder / SPARES, ignore_errors=True)


def remove_segments(folder: Path) -> None:
    """Remove all segments and spare files, when nothing will be read or written here again."""
    for segment in folder.glob("*.seg"):
        segment.unlink(missing_ok=True)
    remove_spares(folder)
