"""Makes calls fail at random that an orchestrator makes for its housekeeping.

Python imports this module at the start of every process that has its folder in PYTHONPATH. Audit hooks
see each call that touches a file, also those made in C, and what a hook raises is what the caller gets.
A line of FAULTS_LOG tells of each fault.
"""

import errno
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

ORCHESTRATOR = "rollway.orchestrator.shell.main:main"
EVENTS = {"open", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.scandir"}
REMOVALS = {"os.remove", "os.rename", "os.rmdir", "os.scandir"}
"""What happens to weights and payload that are no longer needed."""
WRITTEN = ("now.json", "metrics.jsonl", "evals.jsonl", "rollouts/")
TIDIED = ("weights", "payload")
ERRORS = (errno.ENOENT, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ESTALE)
SLOW_S, MAX_SLOW = 5.0, 2
SHARE = 0.3
"""Of all calls. The first calls at each place fail, in all ways."""


class Faults:
    def __init__(self, run: str, log: str, seed: str) -> None:
        self._run = Path(run)
        self._random = random.Random(seed)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._num_slow = 0
        self._untried: dict[str, list[int]] = {}

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS or not isinstance(args[0], str | os.PathLike):
            return
        name = os.fspath(args[0])
        if not name.startswith(f"{self._run}/"):
            return
        place = name.removeprefix(f"{self._run}/")
        wanted = place.startswith(WRITTEN) or (event in REMOVALS and place.startswith(TIDIED))
        if wanted:
            self._perhaps_fail(event, name, place)

    def _perhaps_fail(self, event: str, name: str, place: str) -> None:
        first = place.split("/", 1)[0]
        untried = self._untried.setdefault(first, self._random.sample(ERRORS, len(ERRORS)))
        if untried:
            self._fail(event, name, place, untried.pop())
        elif self._random.random() < SHARE:
            self._fail(event, name, place, self._random.choice((*ERRORS, 0)))

    def _fail(self, event: str, name: str, place: str, code: int) -> None:
        if code == 0 and self._num_slow == MAX_SLOW:
            return
        what = "slow" if code == 0 else errno.errorcode[code]
        os.write(self._log, f"{what} {event} {place}\n".encode())
        if code:
            raise OSError(code, os.strerror(code), name)
        self._num_slow += 1
        time.sleep(SLOW_S)


if ORCHESTRATOR in sys.orig_argv and "FAULTS_RUN" in os.environ:
    sys.addaudithook(
        Faults(os.environ["FAULTS_RUN"], os.environ["FAULTS_LOG"], os.environ["FAULTS_SEED"])
    )
