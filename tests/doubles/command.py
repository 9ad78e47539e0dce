"""Runs the command line in the test's own process, which saves the start of an interpreter."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from rollway.cli.main import main


class CommandResult(NamedTuple):
    """A command's exit code and its output."""

    code: int
    out: str
    err: str


Rollway = Callable[..., CommandResult]
"""Runs `rollway` with these arguments."""


def command(capsys: pytest.CaptureFixture[str]) -> Rollway:
    def rollway(*args: object) -> CommandResult:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        code = ended.value.code
        assert code is None or isinstance(code, int), (
            "main prints errors, not the interpreter"
        )
        return CommandResult(code or 0, *capsys.readouterr())

    return rollway
