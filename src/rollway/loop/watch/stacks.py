"""Reads the stacks of running code and finds the user's line in them."""

import asyncio
import gc
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec import Struct

_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/[^/]+")
_ROLLWAY = str(Path(__file__).resolve().parents[2])
_HEADING = "(most recent call first):"
_WAITING_FILES = ("/asyncio/runners.py", "/selectors.py")
_OUTERMOST = " in _run_module_as_main"
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")
MAX_AWAITING = 1_000
"""Lines of a waiting task that are looked at: a chain of tasks may wait for itself."""
_DUMPED_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.+)$', re.MULTILINE)


class StackLine(Struct, frozen=True):
    file: str
    number: int
    function: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"

    def __str__(self) -> str:
        return f"{self.where} in {self.function}"


def from_frame(frame: FrameType | None) -> list[StackLine]:
    """Return a running thread's stack, innermost line first."""
    return _lines(traceback.walk_stack(frame)) if frame else []


def from_error(error: BaseException) -> list[StackLine]:
    """Return the lines an exception passed through, innermost line first."""
    return _lines(traceback.walk_tb(error.__traceback__))[::-1]


def _lines(frames: Iterable[tuple[FrameType, int]]) -> list[StackLine]:
    codes = ((frame.f_code, number) for frame, number in frames)
    return [StackLine(code.co_filename, number, code.co_qualname) for code, number in codes]


def dump(stack: Sequence[StackLine]) -> str:
    """Write a stack in the format of `faulthandler`."""
    lines = [
        f'  File "{line.file}", line {line.number} in {line.function}\n' for line in stack
    ]
    return "".join([f"Stack {_HEADING}\n", *lines])


def parse_dump(text: str) -> list[StackLine]:
    """Read the last stack that `dump` or `faulthandler` wrote, innermost line first."""
    found = _DUMPED_LINE.findall(text.rpartition(_HEADING)[2])
    return [StackLine(file, int(number), function) for file, number, function in found]


def is_complete(text: str) -> bool:
    """Return whether a dump has ended: with the interpreter's first line, or where it was cut."""
    last = text.rpartition(_HEADING)[2]
    return last.endswith("\n") and (_OUTERMOST in last or "\n  ...\n" in last)


def is_waiting(stack: Sequence[StackLine]) -> bool:
    """Return whether a loop runs no code: it waits for events, or for a CPU."""
    return stack[0].file.endswith(_WAITING_FILES)


def find_user_line(stack: Sequence[StackLine]) -> StackLine:
    """Return the line to name when this stack held something up: the innermost line of the user's own
    files. Without one it is the innermost line of the package that rollway called, because environments
    may be installed as packages. Without that it is the innermost line outside the standard library."""
    for line in stack:
        if not (_is_stdlib(line) or _package(line) or _is_rollway(line)):
            return line
    if called := _called_by_rollway(stack):
        package = _package(called[-1])
        return next(line for line in called if _package(line) == package)
    return next((line for line in stack if not _is_stdlib(line)), stack[0])


def where_awaiting(task: "asyncio.Task[Any]") -> str:
    """Return the user's line at which a task waits; empty if it waits in none."""
    stack = from_task(task)
    line = find_user_line(stack) if stack else None
    return "" if line is None or _is_rollway(line) or _is_stdlib(line) else str(line)


def from_task(task: "asyncio.Task[Any]") -> list[StackLine]:
    """Return the lines at which a task and the tasks that it awaits wait, innermost line first."""
    lines: list[StackLine] = []
    code: Any = task.get_coro()
    while code is not None and len(lines) < MAX_AWAITING:
        if (frame := _attribute(code, _FRAMES)) is not None:
            name = frame.f_code.co_qualname
            lines.append(StackLine(frame.f_code.co_filename, frame.f_lineno, name))
        code = _awaited(code)
    return lines[::-1]


def _awaited(code: Any) -> Any:
    """Return what a coroutine, generator or awaitable waits for, or None. Some awaitables of C do not
    tell it, but the garbage collector knows what they refer to."""
    if isinstance(code, asyncio.Task):
        return code.get_coro()
    if any(hasattr(code, name) for name in _FRAMES):
        return _attribute(code, ("cr_await", "gi_yieldfrom", "ag_await"))
    kinds = (*_FRAMES, "get_coro")
    referents = gc.get_referents(code)
    return next((other for other in referents if any(hasattr(other, k) for k in kinds)), None)


def _attribute(code: Any, names: Iterable[str]) -> Any:
    found = (getattr(code, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def where_raised(error: BaseException) -> str:
    """Return the user's line that an exception passed through last; empty if it passed through none."""
    stack = from_error(error)
    line = find_user_line(stack) if stack else None
    return "" if line is None or _is_rollway(line) or _is_stdlib(line) else str(line)


def find_entry_line(stack: Sequence[StackLine]) -> StackLine | None:
    """Return the line that rollway called, outside Python's standard library."""
    called = _called_by_rollway(stack)
    return called[-1] if called else None


def _called_by_rollway(stack: Sequence[StackLine]) -> list[StackLine]:
    """Return the lines inside rollway's innermost line, without those of the standard library."""
    count = next((index for index, line in enumerate(stack) if _is_rollway(line)), 0)
    return [line for line in stack[:count] if not _is_stdlib(line)]


def _package(line: StackLine) -> str:
    found = _PACKAGES.match(line.file)
    return found[0] if found else ""


def _is_rollway(line: StackLine) -> bool:
    return line.file.startswith(_ROLLWAY)


def _is_stdlib(line: StackLine) -> bool:
    return line.file.startswith(("<", *_STDLIB)) and not _package(line)
