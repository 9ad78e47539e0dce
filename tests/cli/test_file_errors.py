"""Files that cannot be used are named in one line, without a traceback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.doubles.command import Rollway

from rollway.cli.stopping import explain
from rollway.errors import RunDirError
from rollway.records.ids import Step
from rollway.rundir.rundir import RunDir

NOBODY = 65534


@contextmanager
def without_rights() -> Iterator[None]:
    """Let root be nobody for a while: nothing keeps root out of a folder."""
    user = os.geteuid()
    if not user:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_run_folder_that_cannot_be_entered(tmp_path: Path, rollway: Rollway) -> None:
    run = RunDir(tmp_path / "run")
    run.make_folders()
    run.config.write_text("")
    assert "has not begun" in rollway("why", run.path).err, "this has loaded the command"
    run.path.chmod(0)
    try:
        with without_rights():
            code, out, err = rollway("why", run.path)
    finally:
        run.path.chmod(0o700)
    assert (code, out, err) == (
        1,
        "",
        f"rollway: cannot use {run.config}: Permission denied\n",
    )


def test_a_metrics_file_that_is_a_folder_at_a_resume(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.make_folders()
    run.metrics.mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        run.remove_steps_after(Step(1))
    assert explain(raised.value) == f"cannot use {run.metrics}: Is a directory"


def test_errors_of_groups_are_explained_and_bugs_are_not() -> None:
    error = FileNotFoundError(2, "No such file or directory", "a\x1b")
    group = ExceptionGroup("of tasks", [ExceptionGroup("inner", [error])])
    assert explain(group) == r"cannot use a\x1b: No such file or directory"
    assert explain(RunDirError("gone\x9b")) == r"gone\x9b"
    assert explain(OSError(24, "Too many open files")) is None
    assert explain(KeyError("x")) is None
