"""What a run writes down for people, and what it tidies: none of it may end the run."""

import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ParamSpec

from ..errors import RollwayError
from ..loop.lanes.threads import thread

log = logging.getLogger(__name__)

P = ParamSpec("P")
Say = Callable[[str], Awaitable[None]]

LEAST_FREE_BYTES = 32 << 20
"""With less room on a disk of the run, no rollout starts."""


def is_worth_a_line(count: int) -> bool:
    """Return whether the console hears of this repetition: the first, the tenth, the hundredth."""
    return str(count).strip("0") == "1"


class Upkeep:
    """Makes calls that a run can do without. What they raise is counted and said: the first time, the
    tenth, the hundredth."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._failures: Counter[str] = Counter()

    async def attempt(
        self, what: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Make a call that blocks, and return whether it did its work. `what` names that work."""
        try:
            await thread(call, *args, **kwargs)
        except (OSError, RollwayError) as error:
            await self.failed(what, error)
            return False
        return True

    async def failed(self, what: str, error: Exception) -> None:
        self._failures[what] += 1
        count = self._failures[what]
        if is_worth_a_line(count):
            log.warning("%s failed (number %d): %s", what, count, error)
            times = f", for the {count}th time" if count > 1 else ""
            await self._say(f"{what} failed{times}: {error}. The run goes on")


class DiskWatch:
    """Looks at the disks that a run writes to."""

    def __init__(self, folders: tuple[Path, ...], say: Say) -> None:
        self._folders = folders
        self._say = say
        self.has_room = True

    async def look(self) -> bool:
        """Return whether there is room for rollouts. The change is said."""
        full = await thread(self._first_full)
        if (full is None) != self.has_room:
            self.has_room = full is None
            text = "There is room on the disk again: rollouts start"
            if full is not None:
                text = f"The disk of {full} is full: no rollout starts until there is room"
            await self._say(text)
        return self.has_room

    def _first_full(self) -> Path | None:
        for folder in self._folders:
            try:
                if shutil.disk_usage(folder).free < LEAST_FREE_BYTES:
                    return folder
            except OSError:  # removed by hand: whoever writes there says so
                continue
        return None
