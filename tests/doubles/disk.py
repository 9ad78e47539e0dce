"""Records which files are brought to the disk, and which get their final names, in order."""

import os
from pathlib import Path
from typing import Any

import pytest


def record_disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that fills with `sync NAME` and `name NAME` as the real calls are made."""
    done: list[str] = []

    def note(word: str, path: Any) -> None:
        done.append(f"{word} {Path(path).name}")

    def fsync(file: int, real: Any = os.fsync) -> None:
        real(file)
        note("sync", os.readlink(f"/proc/self/fd/{file}"))

    def rename(source: Any, target: Any, real: Any = os.rename) -> None:
        real(source, target)
        note("name", target)

    monkeypatch.setattr(os, "fsync", fsync)
    for call in ("rename", "replace"):
        monkeypatch.setattr(os, call, rename)
    return done
