"""What the orchestrator has to do with one engine: weights, and how busy it is."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from msgspec import Struct

from ...errors import UNREADABLE, EngineAway, EngineError, EngineLate
from ...records.engine import EngineLoad
from ..http.endpoint import ServedModel
from .dialect import Dialect, EngineCall
from .link import EngineLink, dialect_of, open_link
from .status import load_in, version_in

METRICS = EngineCall("/metrics")
ANSWER_S = 10.0
"""A small question that takes longer is not answered."""


class _Result(Struct, frozen=True):
    success: bool = True
    message: str = "refused"


class EngineControl:
    """One engine. EngineAway and EngineLate: it may come back; other EngineErrors: it refuses."""

    def __init__(self, link: EngineLink, served: ServedModel) -> None:
        self._link = link
        self._dialect: Dialect = dialect_of(served, shape=None)
        self.served = served

    @property
    def url(self) -> str:
        return self._link.url

    async def update_weights(self, path: str, version: int) -> None:
        """Load new weights between two decoding steps; requests in flight go on with them."""
        pause, load, go_on = self._dialect.update_weights(path, version)
        try:
            await self._post(pause)
            for call in load:
                await self._post(call)
        except BaseException:
            with suppress(EngineError):  # what went wrong first is what to tell
                await self._post(go_on)
            raise
        await self._post(go_on)

    async def _post(self, call: EngineCall) -> None:
        body = await self._link.text("POST", call)
        try:
            result = msgspec.json.decode(body, type=_Result)
        except UNREADABLE:
            return  # nothing that says more than its status
        if not result.success:
            raise EngineError(f"{self.url}{call.path}: {result.message}")

    async def weight_version(self) -> str:
        """What the engine says it samples from; empty if it does not say."""
        return version_in(await self._get(self._dialect.weight_version))

    async def load(self) -> EngineLoad | None:
        """How busy it is; None if it does not say."""
        return load_in(await self._get(METRICS), self._dialect.gauges)

    async def _get(self, call: EngineCall) -> bytearray:
        """The answer to a small question, empty if the engine does not know it. One that answers with
        an error is not well, and may be well again."""
        try:
            return await self._link.text("GET", call, ANSWER_S)
        except (EngineAway, EngineLate):
            raise
        except EngineError as error:
            if "HTTP 404" in str(error):
                return bytearray()
            raise EngineAway(str(error)) from None


@asynccontextmanager
async def open_control(
    url: str, *, model: str, key: str, deadline_s: float
) -> AsyncIterator[EngineControl]:
    """An engine that answers and serves `model` (any, if not named)."""
    async with open_link(url, key, deadline_s) as link:
        yield EngineControl(link, await link.served(model))
