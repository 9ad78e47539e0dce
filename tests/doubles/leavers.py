"""Child processes that leave things behind."""

import os
import signal
import socket
import subprocess
import sys

SLEEPS = "import time; time.sleep(1000)"


def leave_daemon(name: str, sock: socket.socket) -> None:
    """Start a process in a session of its own, one by fork, and one with an emptied environment, tell
    them, and die. The last two hold our pipe."""
    command = [sys.executable, "-c", SLEEPS]
    daemon = subprocess.Popen(command, start_new_session=True)
    hidden = subprocess.Popen(
        command, start_new_session=True, env={}, pass_fds=[sock.fileno()]
    )
    forked = os.fork()
    if not forked:
        os.setsid()
        while True:
            signal.pause()
    text = f"{daemon.pid} {forked} {hidden.pid}".encode()
    sock.sendall(len(text).to_bytes(8, "little") + text)
    os.kill(os.getpid(), signal.SIGKILL)


def write_garbage(name: str, sock: socket.socket) -> None:
    """Write to all descriptors, as user code may, and live on."""
    for fd in range(3, 1024):
        try:
            os.write(fd, b"garbage" * 100)
        except OSError:
            continue
    signal.pause()


def print_much(name: str, sock: socket.socket) -> None:
    """Print 70 MB, and live until the parent closes the pipe."""
    for _ in range(70):
        os.write(1, b"x" * (1 << 20))
    while sock.recv(1 << 10):
        pass


def list_descriptors(name: str, sock: socket.socket) -> None:
    """Tell which descriptors a program has that this process starts."""
    code = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    command = [sys.executable, "-c", code]
    text = subprocess.run(command, close_fds=False, capture_output=True, check=True).stdout
    sock.sendall(len(text).to_bytes(8, "little") + text)
    sock.recv(1)
