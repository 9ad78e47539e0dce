"""An address that only this user's processes can reach."""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

PREFIX = "rollway-ipc-"
SHORT = "/tmp"
"""For where the temporary folder's own path leaves no room: a unix socket's has about 100 bytes."""
NEW_S = 10.0


@contextmanager
def private_address(name: str) -> Iterator[str]:
    """A unix socket in a new folder that nobody else may enter; both are removed at the end, and so are
    those that killed processes left behind."""
    longest = Path(tempfile.gettempdir()) / f"{PREFIX}{8 * 'x'}" / name
    parent = SHORT if len(os.fsencode(longest)) > zmq.IPC_PATH_MAX_LEN else str(longest.parent.parent)
    for path in Path(parent).glob(f"{PREFIX}*/{name}"):
        if _is_left_behind(path):
            shutil.rmtree(path.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        yield f"ipc://{folder}/{name}"


def _is_left_behind(path: Path) -> bool:
    """Whether it is a socket of this user's that nobody listens at any more. A new one is left alone: a
    socket has a name for a moment before it is listened at."""
    try:
        folder = path.parent.stat()
        is_new = time.time() - folder.st_mtime < NEW_S
        if folder.st_uid != os.getuid() or is_new or not path.is_socket():
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
