"""A scratch folder is private, and is removed however its process ended."""

import os
import stat
import subprocess
import sys
from pathlib import Path

HOLD = """
import sys
from rollway.loop.processes.scratch import scratch_folder
with scratch_folder("rollway-test-") as path:
    print(path, flush=True)
    sys.stdin.read()
"""


def hold(temporary: Path) -> "subprocess.Popen[str]":
    """Start a process that keeps a scratch folder until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD], env={**os.environ, "TMPDIR": str(temporary)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def folder_of(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_folders_of_killed_processes_are_removed_and_those_in_use_stay(
    tmp_path: Path,
) -> None:
    with hold(tmp_path) as dead, hold(tmp_path) as new, hold(tmp_path) as living:
        folders = [folder_of(process) for process in (dead, new, living)]
        assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
        for killed in (dead, new):
            killed.kill()
            killed.wait()
        for folder in (folders[0], folders[2]):
            os.utime(folder, (0, 0))  # as if it had been there for a long time
        with hold(tmp_path) as following:
            last = folder_of(following)
            assert [folder.exists() for folder in folders] == [False, True, True]
            following.communicate("")
        living.communicate("")
    assert not last.exists()
    assert not folders[2].exists()
