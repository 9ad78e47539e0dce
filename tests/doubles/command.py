"""The command line in the test's own process: all of it but the start of an interpreter."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from rollway.cli.main import main


class Done(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


Rollway = Callable[..., Done]
"""`rollway` with these arguments."""


def command(capsys: pytest.CaptureFixture[str]) -> Rollway:
    def rollway(*args: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in args])
        code = ended.value.code
        assert code is None or isinstance(code, int), "an error is told by main, not by the interpreter"
        return Done(code or 0, *capsys.readouterr())

    return rollway
