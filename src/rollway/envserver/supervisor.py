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
MAX_NEVER_READY = 3
HEALTHY_S = 30.0
"""A worker that lived this long restarts without the back-off of those before it."""


async def keep_alive(
    base: str, server: RouterPart, address: str, on_death: Callable[[WorkerName], Awaitable[None]]
) -> None:
    """One worker place, for ever: `base.0`, then `base.1` after its first death, and so on.

    One that dies before it is ready would die again: at once the first time, later after a few tries,
    that ends the server.
    """
    incarnation, never_ready, pause_s = 0, 0, FIRST_PAUSE_S
    while True:
        name = WorkerName(f"{base}.{incarnation}")
        started_s = time.monotonic()
        try:
            await _live(name, server, address)
            never_ready = 0
        except NeverReady as error:
            never_ready += 1
            if incarnation == 0 or never_ready == MAX_NEVER_READY:
                raise
            log.warning("%s could not start: %s", name, error)
        except PartDied as error:
            never_ready = 0
            log.warning("%s", error)
        await on_death(name)
        if time.monotonic() - started_s > HEALTHY_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        incarnation += 1


class NeverReady(PartDied):
    """A worker ended by itself before it could run anything: it cannot start."""


async def _live(name: WorkerName, server: RouterPart, address: str) -> None:
    part = WorkerPart(name, address, server)
    place = name.rpartition(".")[0]
    log_path = Path(server.log_dir) / f"{place}.log"
    async with start_part(place, "rollway.envserver.worker:main", part, log=log_path) as worker:
        try:
            await worker.listen(on_stats=lambda stats: None, on_said=lambda body: None)
        except PartDied as error:
            if worker.was_ready or error.was_killed:
                raise
            raise NeverReady(str(error)) from None
