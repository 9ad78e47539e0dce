"""A lane's process: takes a call, answers it, until the parent is gone.

A thread says where the call is whenever the parent asks. Before it is killed, the process is asked by
a signal: that is answered in C, also inside a call that never lets go of the GIL, but it may cut short
what the call waits for, so it is for calls that are lost anyway.
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
from typing import Any

from msgspec import Struct

from ...wire.pipe import BlockingPipe
from ..watch import stacks
from .memory import unbound

STACK_SIGNAL = signal.SIGRTMAX if sys.platform == "linux" else signal.SIGUSR2
"""Not one that user code is likely to use: time limits inside rewards often take SIGALRM."""


class LaneAnswer(Struct, frozen=True):
    """What a call gave, or the error it raised, where, and its traceback."""

    ok: bool
    value: Any
    where: str = ""
    traceback: str = ""
    is_spent: bool = False
    """The process has run out of memory, and is of no more use."""


class LaneQuestion(Struct, frozen=True):
    """What a running call asks of its caller."""

    value: Any


asking: ContextVar[Callable[[Any], Any] | None] = ContextVar("how to ask the caller", default=None)
"""Set by whoever runs a call."""


def caller() -> Callable[[Any], Any]:
    """From within a call: how to ask whoever made it. The call waits for the answer."""
    ask = asking.get()
    if ask is None:
        raise RuntimeError("only a call in a lane has a caller to ask")
    return ask


def _ask_through(pipe: BlockingPipe, value: Any) -> Any:
    pipe.send(pickle.dumps(LaneQuestion(value), protocol=pickle.HIGHEST_PROTOCOL))
    frame = pipe.receive()
    if frame is None:
        sys.exit(1)  # nobody waits for the result either
    return pickle.loads(frame)


def serve_lane(name: str, sock: socket.socket) -> None:
    """The first frame names the socket that stacks are asked for and written to."""
    pipe = BlockingPipe(sock)
    asking.set(partial(_ask_through, pipe))
    first = pipe.receive()
    if first is None:
        return
    _show_stacks(int(first))
    pipe.send(b"up")
    while (frame := pipe.receive()) is not None:
        pipe.send(_packed(_answer(frame)))


def _show_stacks(fd: int) -> None:
    os.set_inheritable(fd, False)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)
    faulthandler.enable(file=fd, all_threads=False)
    caller = threading.get_ident()
    threading.Thread(target=_show_when_asked, args=(fd, caller), name="stacks", daemon=True).start()


def _show_when_asked(fd: int, caller: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})  # it is the caller's stack that is wanted
    with suppress(OSError):
        while os.read(fd, 1):
            stack = stacks.from_frame(sys._current_frames().get(caller))
            os.write(fd, stacks.dump(stack).encode())


def _answer(frame: bytes) -> LaneAnswer:
    try:
        function, args = pickle.loads(frame)
        return LaneAnswer(True, function(*args))
    except MemoryError as error:
        return _out_of_memory(error)
    except Exception as error:  # user code raises what it likes, and so does unpickling
        return raised(error)


def _out_of_memory(error: MemoryError) -> LaneAnswer:
    bound = unbound()
    line = stacks.find_user_line(stacks.from_traceback(error.__traceback__))
    said = f"MemoryError at {line.where} in {line.function}" + (
        f": its process may take {bound}" if bound else f": {error}"
    )
    return LaneAnswer(False, said, line.where, traceback.format_exc(), is_spent=True)


def _packed(answer: LaneAnswer) -> bytes:
    try:
        return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling asks the user's objects
        return pickle.dumps(raised(error), protocol=pickle.HIGHEST_PROTOCOL)


def raised(error: Exception) -> LaneAnswer:
    """What a call's caller is told of an exception."""
    where = stacks.find_user_line(stacks.from_traceback(error.__traceback__)).where
    return LaneAnswer(False, f"{type(error).__name__}: {error}", where, traceback.format_exc())
