"""A part of a run that serves until it is killed, or that dies before or after it is ready."""

import asyncio
import os
import socket

from msgspec import Struct

from rollway.config.specs import WatchSpec
from rollway.loop.processes.part import Parent, run_part, unchanged


class MortalPart(Struct, frozen=True):
    """`ends` is "never", "before" or "after" the part is ready. `life` is 1 for the first start. A part
    that `meets` another one waits at its end until that part ends as well: the two open a FIFO, one to
    read and one to write. A line in `diary` says that it has ended."""

    life: int
    ends: str = "never"
    watch: WatchSpec = WatchSpec()
    meets: str = ""
    reads: bool = False
    diary: str = ""


async def mortal(part: MortalPart, parent: Parent) -> None:
    if part.ends == "before":
        os._exit(3)
    await parent.report_ready(str(part.life))
    await parent.send(part)
    if part.ends == "after":
        await asyncio.sleep(0.05)
        os._exit(4)
    while await parent.receive() is not None:
        pass
    end(part)


def end(part: MortalPart) -> None:
    if part.meets:
        with open(part.meets, "r" if part.reads else "w"):
            pass
    if part.diary:
        with open(part.diary, "a") as file:
            file.write(f"{part.life}\n")


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, MortalPart, unchanged, mortal)
