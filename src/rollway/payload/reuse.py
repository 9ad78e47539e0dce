"""Files of released segments, which next ones are written into. Blocks.

Removing a file gives all its memory back at once, and a new one takes as much page by page. On a virtual
machine, which hands free memory to its host, that holds up every process for up to 200 ms, and it costs
a worker a tenth of its CPU. So a payload folder stays as large as it once had to be, until its run ends.
"""

import os
from contextlib import suppress
from pathlib import Path

from ..errors import PayloadError
from .lock import alone

SPARE = ".spare"


def retire(path: Path) -> None:
    """Nobody needs this segment any more: its file is spare. If somebody looks at it all the same, or
    nobody can tell, it is removed, and their views stay what they are."""
    try:
        with alone(path, os.O_RDONLY):
            path.rename(path.with_name(path.name + SPARE))
    except PayloadError:
        path.unlink(missing_ok=True)


def take(path: Path) -> bool:
    """Put a spare file in the place of `path`, with the bytes it has; False if there is none."""
    for one in path.parent.glob(f"*{SPARE}"):
        with suppress(FileNotFoundError):  # another writer was faster
            if os.access(one, os.W_OK):
                one.rename(path)
                return True
    return False


def drop_spares(folder: Path) -> None:
    """Nothing is written here for now: give the space back."""
    for one in folder.glob(f"*{SPARE}"):
        one.unlink(missing_ok=True)


def drop_all(folder: Path) -> None:
    """Nothing that lies here will be read, nor more be written."""
    for one in folder.glob("*.seg"):
        one.unlink(missing_ok=True)
    drop_spares(folder)
