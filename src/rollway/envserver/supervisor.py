"""Keeps an environment's workers alive: starts them, notices their death at once, starts them anew."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..config.parts import RouterPart, WorkerPart
from ..errors import PartDied
from ..loop.part import start_part
from ..records.ids import WorkerName

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
HEALTHY_S = 30.0
"""A worker that lived this long restarts without the back-off of those before it."""


async def keep_alive(
    base: str, server: RouterPart, address: str, on_death: Callable[[WorkerName], Awaitable[None]]
) -> None:
    """One worker place, for ever: `base.0`, then `base.1` after its first death, and so on.

    If the first one dies before it was ever ready the next would too: that ends the server.
    """
    incarnation, pause_s = 0, FIRST_PAUSE_S
    while True:
        name = WorkerName(f"{base}.{incarnation}")
        started_s = time.monotonic()
        try:
            await _live(name, server, address)
        except NeverReady:
            if incarnation == 0:
                raise
        except PartDied as error:
            log.warning("%s", error)
        await on_death(name)
        if time.monotonic() - started_s > HEALTHY_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        incarnation += 1


class NeverReady(PartDied):
    """A worker ended before it could run anything."""


async def _live(name: WorkerName, server: RouterPart, address: str) -> None:
    part = WorkerPart(name, address, server)
    log_path = Path(server.log_dir) / f"{name.rpartition('.')[0]}.log"
    async with start_part(name, "rollway.envserver.worker:main", part, log=log_path) as worker:
        try:
            await worker.listen(on_stats=lambda stats: None, on_said=lambda body: None)
        except PartDied as error:
            if worker.was_ready:
                raise
            raise NeverReady(str(error)) from None
