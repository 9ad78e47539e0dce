"""The process of a lane: it takes a call, answers it, and ends when its parent is gone.

The parent can ask a thread of this process for the stack of the running call. Before the parent kills
the process, it asks by a signal instead, which is answered in C, even inside a call that never releases
the GIL. A signal may interrupt what the call waits for, so only calls that are lost anyway get one.
"""

import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Never

from msgspec import Struct

from ...errors import LaneRaised
from ...wire.pipe import BlockingPipe
from ..processes.child import receive_spec
from ..watch import stacks
from .memory import lift_limit

STACK_SIGNAL = signal.SIGRTMAX if sys.platform == "linux" else signal.SIGUSR2
"""A signal that user code is unlikely to use: time limits inside rewards often take SIGALRM."""

dumps = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)


class LaneResult(Struct, frozen=True):
    value: Any

    def take(self) -> Any:
        return self.value


class LaneFailure(Struct, frozen=True):
    """The error a call raised: its class, its text, the user's line and the traceback."""

    kind: str
    text: str
    where: str = ""
    traceback: str = ""
    is_out_of_memory: bool = False
    """The process has run out of memory and must be replaced."""

    def take(self) -> Never:
        raise LaneRaised(self.kind, self.text, traceback=self.traceback, where=self.where)


class LaneQuestion(Struct, frozen=True):
    pickled: bytes
    """Pickled apart, so that a question is known as one even if its value cannot be read."""


LaneAnswer = LaneResult | LaneFailure
"""`take` returns the value or raises the error."""
Ask = Callable[[Any], Any]

ask_caller: ContextVar[Ask | None] = ContextVar("ask the caller", default=None)
"""Asks the caller of the running call and waits for the answer. Every lane sets it before a call."""


def find_caller() -> Ask:
    """Return the function with which a running call asks its caller and waits for the answer."""
    ask = ask_caller.get()
    if ask is None:
        raise RuntimeError("only a call in a lane has a caller to ask")
    return ask


def _ask_through(pipe: BlockingPipe, value: Any) -> Any:
    pipe.send(dumps(LaneQuestion(dumps(value))))
    frame = pipe.receive()
    if frame is None:
        sys.exit(1)  # the parent is gone, so nothing waits for the result either
    return pickle.loads(frame)


def serve_lane(name: str, sock: socket.socket) -> None:
    """Answer calls. The spec is the descriptor on which stacks are asked for and written."""
    pipe, stack_fd = receive_spec(sock, int)
    ask_caller.set(partial(_ask_through, pipe))
    _show_stacks(stack_fd)
    pipe.send(b"up")
    while (frame := pipe.receive()) is not None:
        pipe.send(_pack(_answer(frame)))


def _show_stacks(fd: int) -> None:
    os.set_inheritable(fd, False)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)
    faulthandler.enable(file=fd, all_threads=False)
    args = fd, threading.get_ident()
    threading.Thread(target=_show_when_asked, args=args, name="stacks", daemon=True).start()


def _show_when_asked(fd: int, main_thread: int) -> None:
    # the main thread must take the signal: the stack to show is its own
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})
    with suppress(OSError):
        while os.read(fd, 1):
            stack = stacks.from_frame(sys._current_frames().get(main_thread))
            os.write(fd, stacks.dump(stack).encode())


def _answer(frame: bytes) -> LaneAnswer:
    try:
        function, args = pickle.loads(frame)
        return LaneResult(function(*args))
    except MemoryError as error:
        return _out_of_memory(error)
    except Exception as error:  # user code may raise anything, and so may unpickling
        return describe(error)


def _out_of_memory(error: MemoryError) -> LaneFailure:
    limit = lift_limit()
    line = stacks.find_user_line(stacks.from_error(error))
    reason = f"its process may take {limit}" if limit else str(error)
    trace = traceback.format_exc()
    return LaneFailure("MemoryError", reason, str(line), trace, is_out_of_memory=True)


def _pack(answer: LaneAnswer) -> bytes:
    try:
        return dumps(answer)
    except Exception as error:  # pickling runs code of the user's objects
        return dumps(describe(error))


def describe(error: Exception) -> LaneFailure:
    """Return the failure that a call's caller hears of for an exception that was just raised."""
    where, trace = stacks.where_raised(error), traceback.format_exc()
    return LaneFailure(type(error).__name__, str(error), where, trace)
