"""Temporary folders that are removed however the process that has one ends."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEW_S = 10.0
"""A folder this new is never taken for left behind: for a moment, its process does not hold it yet."""


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a new temporary folder that only this user can enter. It is locked until it is removed.
    Folders of this prefix that killed processes left behind are removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            found = left.stat()
            is_old = time.time() - found.st_mtime > NEW_S
            if is_old and found.st_uid == os.getuid():
                with _locked(left):
                    shutil.rmtree(left, ignore_errors=True)
    new = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    with new as name, _locked(folder := Path(name)):
        yield folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. Raise BlockingIOError if another one holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
