"""An address that only this user's processes can reach."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import zmq

SHORT = "/tmp"
"""For where the temporary folder's own path leaves no room: a unix socket's has about 100 bytes."""


@contextmanager
def private_address(name: str) -> Iterator[str]:
    """A unix socket in a new folder that nobody else may enter; both are removed at the end."""
    with TemporaryDirectory(prefix="rollway-") as folder:
        path = f"{folder}/{name}"
        if len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN:
            yield f"ipc://{path}"
            return
    with TemporaryDirectory(prefix="rollway-", dir=SHORT) as folder:
        yield f"ipc://{folder}/{name}"
