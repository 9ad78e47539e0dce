"""One process at a time in a folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import RunDirError


@contextmanager
def only_one(folder: Path, does: str) -> Iterator[None]:
    """Keeps others out; the kernel lets go when this process ends. `does` is what the other one does."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(f"another process {does}") from None
        yield
    finally:
        os.close(held)
