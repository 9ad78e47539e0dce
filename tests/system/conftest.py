"""What tests of whole runs share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doubles.workspace import Workspace


@pytest.fixture
def work(tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.chdir(tmp_path)
    work = Workspace(tmp_path, tiny_moe)
    yield work
    for process in work.processes():
        process.kill()
