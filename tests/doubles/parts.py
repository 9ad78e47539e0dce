"""Parts of a run, started by a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollway.loop.processes.part import Part, start_part

ROUTER = "rollway.envserver.router.router:main"
ENGINE = "rollway.inference.embedded.front:main"


@asynccontextmanager
async def serving_part(
    name: str, entry: str, spec: Any, log: Path | None = None
) -> AsyncIterator[tuple[Part, str]]:
    """Start a part and yield it with its address. Raise what ended a part that never served."""
    async with start_part(name, entry, spec, log=log) as part:
        listening = asyncio.ensure_future(part.listen(lambda stats: None, lambda body: None))
        ready = asyncio.ensure_future(part.ready())
        try:
            await asyncio.wait([listening, ready], return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()
            yield part, ready.result()
        finally:
            ready.cancel()
            listening.cancel()
