"""What each kind of work does to a loop's lag, on each lane: the table behind "work has a lane".

    python bench/lanes.py [--full] [--seconds 1.5] [--mb 24] [--json FILE]

One caller does the same piece of work over and over, inline, in one thread or in the process lane, while
a ticker on the loop notes how late it is. A thread helps exactly where the call lets go of the GIL. The
process lane shares a file with its caller, so that no bytes go through its pipe. A *control* only ticks.
"""

import asyncio
import base64
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pybase64
from crc32c import crc32c
from loopback.control import tick
from loopback.processes import started
from loopback.report import arguments, finish, lag_figures, table

from rollway.config.sections import WatchConfig
from rollway.loop.lanes import ProcessLane, thread
from rollway.loop.run import Watch, run

COLUMNS = ("inline p99", "inline max", "thread p99", "thread max", "process p99", "process max")


class Material:
    """The bytes all works work on: a file that is mapped, so that a process sees the same."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.bytes = memoryview(mmap.mmap(file.fileno(), 0))
        self.text = pybase64.b64encode(self.bytes[: len(self.bytes) // 4 * 3])
        self.json = b'{"routes": "' + self.text + b'"}'
        self.ints = json.dumps(list(range(200_000))).encode()
        self.target = np.empty(len(self.bytes), np.uint8)
        self.source = np.frombuffer(self.bytes, np.uint8)
        self.file = os.memfd_create("bench")


def python_loop(m: Material) -> None:
    total = 0
    for n in range(300_000):
        total += n * n


WORKS: dict[str, Callable[[Material], Any]] = {
    "pybase64 decode": lambda m: pybase64.b64decode_as_bytearray(m.text, validate=True),
    "crc32c": lambda m: crc32c(m.bytes),
    "np.copyto": lambda m: np.copyto(m.target, m.source),
    "pwrite": lambda m: os.pwrite(m.file, m.bytes, 0),
    "base64 decode (stdlib)": lambda m: base64.b64decode(m.text),
    "msgspec JSON of one string": lambda m: msgspec.json.decode(m.json),
    "json of 200,000 ints": lambda m: json.loads(m.ints),
    "msgpack encode": lambda m: msgspec.msgpack.encode(m.bytes),
    "bytes(memoryview)": lambda m: bytes(m.bytes),
    "pure Python, 300,000 steps": python_loop,
}
LETS_GO = ("pybase64 decode", "crc32c", "np.copyto", "pwrite")
_materials: dict[str, Material] = {}


def work_there(path: str, name: str) -> None:
    """In the lane's process: the same work on the same file."""
    if path not in _materials:
        _materials[path] = Material(path)
    WORKS[name](_materials[path])


def measure(path: str, seconds: float) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}

    async def repeat(watch: Watch, once: Callable[[], Any]) -> tuple[float, float]:
        await once()
        watch.take()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await once()
            await asyncio.sleep(0)
        lag = lag_figures(watch.take().lag)
        return lag["p99 ms"], lag["max ms"]

    async def main(watch: Watch) -> None:
        here = Material(path)
        async with ProcessLane("bench", 1) as lane:
            for name, work in WORKS.items():

                async def inline(work: Callable[[Material], Any] = work) -> None:
                    work(here)

                async def threaded(work: Callable[[Material], Any] = work) -> None:
                    await thread(work, here)

                async def elsewhere(name: str = name) -> None:
                    await lane.call(work_there, path, name, deadline_s=60)

                row = rows[name] = {}
                for kind, once in (("inline", inline), ("thread", threaded), ("process", elsewhere)):
                    row[f"{kind} p99"], row[f"{kind} max"] = await repeat(watch, once)

    run("bench", WatchConfig(stall_ms=1e6, tick_ms=2, warn_p90_ms=0, warn_p99_ms=0, warn_max_ms=0), main)
    return rows


def main() -> None:
    args = arguments(__doc__, seconds=(1.5, "seconds a cell"), mb=(24, "megabytes of material"))
    if args.full:
        args.seconds = max(args.seconds, 6.0)
    with tempfile.NamedTemporaryFile() as file, started(tick) as control:
        Path(file.name).write_bytes(np.random.default_rng(0).bytes(args.mb << 20))
        rows = measure(file.name, args.seconds)
        bare = lag_figures(control.ask())
    print(f"lag of the loop in ms, work on {args.mb} MB at a time")
    table(rows, COLUMNS)
    print(f"control p99 {bare['p99 ms']:.1f}, max {bare['max ms']:.1f}")
    holding = [row for name, row in rows.items() if name not in LETS_GO]
    for lane in ("thread", "process"):
        worst = max(row[f"{lane} p99"] for row in holding)
        print(f"worst p99 of work that holds the GIL, in a {lane}: {worst:.1f} ms")
    worst = max(rows[name]["thread p99"] for name in LETS_GO)
    print(f"worst p99 of work that lets go of it, in a thread: {worst:.1f} ms")
    finish("lanes", {"works": rows, "control": bare}, args.json)


if __name__ == "__main__":
    main()
