"""Whom a stack accuses: the line of the user's that everything deeper was called from."""

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

from msgspec import Struct

_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/[^/]+")
_OURS = str(Path(__file__).resolve().parents[2])
_FOLLOWS = "(most recent call first):"
_WAITS = ("/asyncio/runners.py", "/selectors.py")
_OUTERMOST = " in _run_module_as_main"
_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.+)$', re.MULTILINE)


class StackLine(Struct, frozen=True):
    """One level of a stack."""

    file: str
    number: int
    function: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"


def of_frame(frame: FrameType | None) -> list[StackLine]:
    """A running thread's stack, innermost first."""
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(StackLine(code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back
    return lines


def of_traceback(traceback: TracebackType | None) -> list[StackLine]:
    """Where an exception came through, innermost first."""
    lines = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        lines.append(StackLine(code.co_filename, traceback.tb_lineno, code.co_qualname))
        traceback = traceback.tb_next
    return lines[::-1]


def dump(stack: Sequence[StackLine]) -> str:
    """A stack in the words of `faulthandler`."""
    lines = [f'  File "{one.file}", line {one.number} in {one.function}\n' for one in stack]
    return "".join([f"Stack {_FOLLOWS}\n", *lines])


def of_dump(text: str) -> list[StackLine]:
    """The last stack in what `dump` or `faulthandler` wrote, innermost first."""
    last = text.rpartition(_FOLLOWS)[2]
    return [StackLine(file, int(number), function) for file, number, function in _DUMPED.findall(last)]


def is_whole(text: str) -> bool:
    """Whether a dump has come to its end: the interpreter's own first line, or where it was cut."""
    last = text.rpartition(_FOLLOWS)[2]
    return last.endswith("\n") and (_OUTERMOST in last or "\n  ...\n" in last)


def is_waiting(stack: Sequence[StackLine]) -> bool:
    """Whether a loop runs nobody's code: it waits for events, or for a core to run on."""
    return stack[0].file.endswith(_WAITS)


def culprit(stack: Sequence[StackLine]) -> StackLine:
    """The innermost line of the user's own files, else of the package that our code called into
    (environments are installed as packages too), else the innermost that is not Python's own."""
    for line in stack:
        if not _is_stdlib(line) and not _PACKAGES.match(line.file) and not _is_ours(line):
            return line
    inside = [line for line in _inside_of_ours(stack) if not _is_stdlib(line)]
    if inside:
        package = _package(inside[-1])
        return next(line for line in inside if _package(line) == package)
    return next((line for line in stack if not _is_stdlib(line)), stack[0])


def entered(stack: Sequence[StackLine]) -> StackLine | None:
    """The first line that is neither ours nor Python's: what our code called."""
    return next((line for line in reversed(_inside_of_ours(stack)) if not _is_stdlib(line)), None)


def _inside_of_ours(stack: Sequence[StackLine]) -> list[StackLine]:
    """What our innermost line called, directly or not."""
    count = next((at for at, line in enumerate(stack) if _is_ours(line)), 0)
    return list(stack[:count])


def _package(line: StackLine) -> str:
    found = _PACKAGES.match(line.file)
    return found[0] if found else ""


def _is_ours(line: StackLine) -> bool:
    return line.file.startswith(_OURS)


def _is_stdlib(line: StackLine) -> bool:
    return line.file.startswith(("<", *_STDLIB)) and not _PACKAGES.match(line.file)
