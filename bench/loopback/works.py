"""Pieces of work that a lane may do, on bytes that lie in a file: a process sees the same ones."""

import base64
import json
import mmap
import os
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pybase64
from crc32c import crc32c


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
