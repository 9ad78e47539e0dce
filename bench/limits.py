"""What the machine can do at best: the figures the others are to be read beside.

    python bench/limits.py [--full] [--seconds 0.5] [--json FILE]

One core each, GB/s: copies into memory that was used before and into fresh pages, writes to a file,
bytes through a loopback socket, decoding and checksums.
"""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np
import pybase64
from crc32c import crc32c
from loopback.report import arguments, finish

SIZE = 32 << 20
PIECE = 64 << 10


def speed(once: Callable[[], int], seconds: float) -> float:
    """GB/s of a call that says how many bytes it moved."""
    once()
    moved, start_s = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - start_s) < seconds:
        moved += once()
    return moved / passed_s / 1e9


def write_to(folder: str | None) -> Callable[[], int]:
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
    data = np.ones(SIZE, np.uint8)
    at = 0

    def once() -> int:
        nonlocal at
        at = (at + SIZE) % (512 << 20)
        if not at:
            os.ftruncate(file.fileno(), 0)
        return os.pwrite(file.fileno(), data.data, at)

    return once


def through_loopback() -> Callable[[], int]:
    """Bytes received, in pieces as large as rollway's, while a thread sends."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    data = bytes(1 << 20)

    def send() -> None:
        try:
            while True:
                sender.sendall(data)
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()
    buffer = bytearray(PIECE)
    return lambda: receiver.recv_into(buffer)


def main() -> None:
    args = arguments(__doc__, seconds=(0.5, "seconds a figure"))
    if args.full:
        args.seconds = max(args.seconds, 3.0)
    source, target = np.ones(SIZE, np.uint8), np.ones(SIZE, np.uint8)
    text = pybase64.b64encode(source[: SIZE // 4 * 3])

    def warm() -> int:
        np.copyto(target, source)
        return SIZE

    def fresh() -> int:
        source.copy()
        return SIZE

    def decode() -> int:
        pybase64.b64decode_as_bytearray(text[: 1 << 20], validate=True)
        return 1 << 20

    def check() -> int:
        crc32c(source)
        return SIZE

    works: dict[str, Callable[[], int]] = {
        "copy into warm memory": warm,
        "copy into fresh pages": fresh,
        "write to a file on disk": write_to(None),
        "loopback TCP, received": through_loopback(),
        "base64 decode, 1 MB at a time": decode,
        "crc32c": check,
    }
    if os.path.isdir("/dev/shm"):
        works["write to a file in memory"] = write_to("/dev/shm")
    figures = {name: speed(once, args.seconds) for name, once in works.items()}
    for name, value in figures.items():
        print(f"{name:32}{value:6.1f} GB/s")
    finish("limits", figures, args.json)


if __name__ == "__main__":
    main()
