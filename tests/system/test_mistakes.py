"""Every mistake is found before a model is loaded, said in one line, and leaves nothing behind."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.doubles.command import Rollway
from tests.doubles.mistakes import MISTAKES, Mistake, desk

pytestmark = pytest.mark.system

LOOK_EVERY_S = 0.02
HEAVY = ("inference.embedded", "vllm_server", "trainer", "warmup.imitate", "envserver")
"""Parts of the names of processes that load a model or run rollouts."""


@contextmanager
def started_processes() -> Iterator[set[str]]:
    """Collect the command lines of all processes that are started while the block lasts."""
    me, seen, is_over = psutil.Process(), set[str](), threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            for process in me.children(recursive=True):
                try:
                    seen.add(" ".join(process.cmdline()))
                except psutil.NoSuchProcess:
                    continue

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        is_over.set()
        looking.join()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_said_at_once_and_leaves_nothing_behind(
    mistake: Mistake,
    tmp_path: Path,
    tiny_moe: Path,
    rollway: Rollway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    children = set(psutil.Process().children(recursive=True))  # of other tests
    with desk(tmp_path, tiny_moe) as places, started_processes() as seen:
        before = {path.name for path in tmp_path.iterdir()}
        result = rollway(*[word.format(**places) for word in mistake.words])
    assert result.code == mistake.code
    assert re.search(mistake.said.replace("{port}", places["port"]), result.err), result.err
    lines = [
        line for line in result.err.splitlines() if not line.startswith("Still checking")
    ]
    assert mistake.code == 2 or len(lines) == 1, "one line, no traceback"
    heavy = [line for line in seen if any(word in line for word in HEAVY)]
    assert not heavy, "no process that loads a model was started"
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == before
    assert set(psutil.Process().children(recursive=True)) <= children
