"""Loads weights into one engine and asks for its version and load. The orchestrator uses it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from msgspec import Struct

from ...errors import UNREADABLE, EngineAway, EngineError, EngineLate
from ...records.engine import EngineLoad
from ..http.endpoint import ServedModel
from .dialect import Dialect, EngineCall
from .link import EngineAccess, EngineLink, open_link, pick_dialect
from .status import parse_load, parse_version

METRICS = EngineCall("/metrics")
QUERY_DEADLINE_S = 10.0
"""How long an engine may take to report its version or its load."""


class _Result(Struct, frozen=True):
    success: bool = True
    message: str = "refused"


class EngineControl:
    """One engine. After EngineAway or EngineLate it may come back. Other EngineErrors are refusals."""

    def __init__(self, link: EngineLink, served: ServedModel) -> None:
        self._link = link
        self.url = link.url
        self._dialect: Dialect = pick_dialect(served, shape=None)
        self.served = served

    async def update_weights(self, path: str, version: int) -> None:
        """Pause decoding and load new weights. Requests in flight then continue with them."""
        update = self._dialect.weight_update(path, version)
        try:
            await self._post(update.pause)
            for call in update.load:
                await self._post(call)
        except BaseException:
            with suppress(EngineError):  # the first error is the one to raise
                await self._post(update.resume)
            raise
        await self._post(update.resume)

    async def _post(self, call: EngineCall) -> None:
        body = await self._link.fetch("POST", call)
        try:
            result = msgspec.json.decode(body, type=_Result)
        except UNREADABLE:
            return  # the answer says no more than its status, which was 200
        if not result.success:
            raise EngineError(f"{self.url}{call.path}: {result.message}")

    async def weight_version(self) -> str:
        return parse_version(await self._get(self._dialect.weight_version))

    async def load(self) -> EngineLoad | None:
        return parse_load(await self._get(METRICS), self._dialect.gauges)

    async def _get(self, call: EngineCall) -> bytearray:
        """Return the answer, empty if the engine does not know the path. Any other refusal raises
        EngineAway, because an engine that answers with an error may recover."""
        try:
            return await self._link.fetch("GET", call, QUERY_DEADLINE_S)
        except (EngineAway, EngineLate):
            raise
        except EngineError as error:
            if error.status == 404:
                return bytearray()
            raise EngineAway(str(error), status=error.status) from None


@asynccontextmanager
async def open_control(access: EngineAccess) -> AsyncIterator[EngineControl]:
    """Open the control of an engine that answers and serves the model of `access`."""
    with open_link(access) as link:
        yield EngineControl(link, await link.fetch_model())
