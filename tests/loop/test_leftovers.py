"""What a killed command leaves in the background ends with the next command in the same folder."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rollway.cli.serve import claimed
from rollway.loop.processes.leftovers import MARK

LEAVE = """
import subprocess, sys
from pathlib import Path
from rollway.loop.processes.leftovers import mark_folder
mark_folder(Path(sys.argv[1]))
code = "import time; print(flush=True); time.sleep(1000)"
left = subprocess.Popen([sys.executable, "-c", code], stdout=-1, start_new_session=True)
left.stdout.readline()
print(left.pid, flush=True)
sys.stdin.read()
"""
NESTED = """
import subprocess, sys
from pathlib import Path
from rollway.loop.processes.leftovers import mark_folder
if len(sys.argv) > 2:
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]]).returncode)
mark_folder(Path(sys.argv[1]))
print("alive", flush=True)
"""


@contextmanager
def leftover_in(folder: Path) -> Iterator[psutil.Process]:
    """Yield a process that a killed command has left in a folder."""
    command = [sys.executable, "-c", LEAVE, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        left = psutil.Process(int(killed.stdout.readline()))
        killed.kill()
    try:
        yield left
    finally:
        if left.is_running():
            left.kill()


def run_command(code: str, *args: Path | str) -> str:
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, input="")
    return done.stdout


def has_ended(process: psutil.Process) -> bool:
    gone, _ = psutil.wait_procs([process], timeout=60)
    return bool(gone)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_the_next_command_in_a_folder_ends_what_a_killed_one_left(
    folder: Path, tmp_path: Path
) -> None:
    with leftover_in(folder) as left:
        run_command(NESTED, tmp_path)
        assert left.is_running(), "another folder"
        run_command(NESTED, folder)
        assert has_ended(left)


def test_a_command_that_has_the_mark_of_its_folder_does_not_end_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell that a killed run left has the mark, and so has what is typed in it."""
    with leftover_in(folder) as left:
        monkeypatch.setenv(MARK, left.environ()[MARK])
        assert run_command(NESTED, folder, NESTED) == "alive\n"
        assert has_ended(left)


def test_a_server_ends_what_a_killed_one_left_unless_another_server_lives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, "")
    with leftover_in(folder) as left, claimed(folder):
        assert has_ended(left)
        mark = os.environ[MARK]
        with leftover_in(folder) as living, claimed(folder):
            assert living.is_running()
            assert os.environ[MARK] == mark
