"""Builds a folder once for all test processes. Each of them would otherwise build its own."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def build_once(
    factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]
) -> Path:
    """Return a folder that `build` has filled. The first test process to get here calls `build`, and the
    others wait until it is done. Tests must not change the folder."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, done = root / name, root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            build(folder)
            done.touch()
    return folder
