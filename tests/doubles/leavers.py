"""Child processes that leave things behind."""

import os
import signal
import socket
import subprocess
import sys

SLEEPS = "import time; time.sleep(1000)"


def leave_daemon(name: str, sock: socket.socket) -> None:
    """Start a process in a session of its own and one by fork, which holds our pipe; tell them; die."""
    daemon = subprocess.Popen([sys.executable, "-c", SLEEPS], start_new_session=True)
    forked = os.fork()
    if not forked:
        os.setsid()
        while True:
            signal.pause()
    text = f"{daemon.pid} {forked}".encode()
    sock.sendall(len(text).to_bytes(8, "little") + text)
    os.kill(os.getpid(), signal.SIGKILL)


def write_garbage(name: str, sock: socket.socket) -> None:
    """Write to all descriptors, as user code may, and live on."""
    for fd in range(3, 64):
        try:
            os.write(fd, b"garbage" * 100)
        except OSError:
            continue
    signal.pause()


def list_descriptors(name: str, sock: socket.socket) -> None:
    """Tell which descriptors a program has that this process starts."""
    code = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    command = [sys.executable, "-c", code]
    text = subprocess.run(command, close_fds=False, capture_output=True, check=True).stdout
    sock.sendall(len(text).to_bytes(8, "little") + text)
    sock.recv(1)
