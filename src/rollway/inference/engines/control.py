"""Loads weights into one engine and asks for its version and load. The orchestrator uses it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from msgspec import Struct

from ...errors import UNREADABLE, EngineAway, EngineError, EngineLate, ReplyAborted
from ...model.shape import ModelShape
from ...records.engine import EngineLoad
from ..http.api_client import ApiClient
from ..http.endpoint import ServedModel
from .dialect import Dialect, EngineCall, ProbeAnswer, Texts
from .facts import EngineFacts, parse_facts
from .link import (
    NO_TOKENS,
    NOT_FOUND,
    EngineAccess,
    EngineApi,
    address_of,
    naming_address,
    pick_dialect,
)
from .status import parse_load, parse_version

METRICS = EngineCall("/metrics")
OURS = "rollway"
"""The owner of models that the embedded engine lists."""
QUERY_DEADLINE_S = 10.0
"""How long an engine may take to report its version or its load."""
SERVER_INFO = EngineCall("/server_info?config_format=json")
FACTS_DEADLINE_S = 60.0
"""vLLM first collects what is installed on its machine."""
NOT_NUMBERS = "not JSON compliant"
"""What vLLM says instead of an answer with NaN in it."""
MAX_ABORTED = 5
PROBE_DEADLINE_S = 60.0
"""How long an engine may take to answer a probe, behind the requests that it has."""


SHOWN_BYTES = 80


class _Result(Struct, frozen=True):
    success: bool = True
    message: str = "refused"


class EngineControl:
    """One engine. After EngineAway or EngineLate it may come back. Other EngineErrors are refusals."""

    def __init__(
        self, api: EngineApi, served: ServedModel, shape: ModelShape | None = None
    ) -> None:
        self._api = api
        self.url = api.url
        self._dialect: Dialect = pick_dialect(served, shape)
        self.served = served
        self._is_paused = False
        self._has_plugin = False

    async def load_weights(self, path: str, version: int) -> None:
        """Pause decoding and load new weights. An engine that cannot answer a probe while it is paused
        continues at once, others when `confirm` is called. If the load fails, the engine stays paused:
        it may have a broken model, of which the next request would make it die."""
        update = self._dialect.weight_update(path, version, has_plugin=self._has_plugin)
        await self._post(update.pause)
        for call in update.load:
            await self._post(call)
        self._is_paused = self.served.owned_by == OURS
        if not self._is_paused:
            await self._post(update.resume)

    async def pause_and_resume(self) -> None:
        update = self._dialect.weight_update("", 0)
        await self._post(update.pause)
        await self._post(update.resume)

    async def confirm(self, version: int) -> None:
        """Tell the engine which version it has, and let it continue. An engine that keeps no version is
        not told."""
        update = self._dialect.weight_update("", version)
        try:
            await self._post(update.label)
        except EngineError as error:
            if error.status != NOT_FOUND:
                raise
        if self._is_paused:
            await self._post(update.resume)
            self._is_paused = False

    async def probe(self, texts: Texts, *, reads_cache: bool = False) -> list[ProbeAnswer]:
        """Return what the engine says of these texts. See `Dialect.encode_probe`. An answer that another
        client aborts is asked for again."""
        body = self._dialect.encode_probe(self.served.id, texts, reads_cache=reads_cache)
        for _ in range(MAX_ABORTED):
            with suppress(ReplyAborted):
                return await self._ask_probe(body)
        raise EngineLate(f"{self.url}: the answer to a probe was aborted {MAX_ABORTED} times")

    async def _ask_probe(self, body: bytes) -> list[ProbeAnswer]:
        dialect = self._dialect
        try:
            answer = await self._api.fetch(
                "POST", EngineCall(dialect.path, body), PROBE_DEADLINE_S
            )
        except EngineError as error:
            if error.status == NOT_FOUND:
                raise EngineError(f"{error}. {NO_TOKENS}") from None
            if NOT_NUMBERS not in str(error):
                raise
            raise EngineError(
                f"the logprobs of {self.url} are not numbers: its weights are damaged, or it got a "
                "checkpoint that lacks a part of them"
            ) from None
        return dialect.parse_probe(answer)

    async def _post(self, call: EngineCall) -> None:
        body = await self._api.fetch("POST", call)
        if not body.strip():
            return  # the answer says no more than its status, which was 200
        try:
            result = msgspec.json.decode(body, type=_Result)
        except UNREADABLE as error:
            shown = bytes(body[:SHOWN_BYTES]).decode(errors="replace")
            raise EngineError(
                f"{self.url}{call.path}: the answer is not that of an engine ({error}): {shown!r}"
            ) from None
        if not result.success:
            raise EngineError(f"{self.url}{call.path}: {result.message}")

    async def read_facts(self) -> EngineFacts | None:
        """Ask the engine how it was started. None if it does not tell."""
        facts = parse_facts(await self._get(SERVER_INFO, FACTS_DEADLINE_S))
        self._has_plugin = facts is not None and facts.has_plugin
        return facts

    async def weight_version(self) -> str:
        return parse_version(await self._get(self._dialect.weight_version))

    async def load(self) -> EngineLoad | None:
        return parse_load(await self._get(METRICS), self._dialect.gauges)

    async def _get(self, call: EngineCall, deadline_s: float = QUERY_DEADLINE_S) -> bytearray:
        """Return the answer, empty if the engine does not know the path. Any other refusal raises
        EngineAway, because an engine that answers with an error may recover."""
        try:
            return await self._api.fetch("GET", call, deadline_s)
        except (EngineAway, EngineLate):
            raise
        except EngineError as error:
            if error.status == NOT_FOUND:
                return bytearray()
            raise EngineAway(str(error), status=error.status) from None


@asynccontextmanager
async def open_api(
    access: EngineAccess, *, proxied: bool = False
) -> AsyncIterator[EngineApi]:
    """Open an engine for small calls. It need not be running yet. Completions of token ids come from it
    directly, so only for a server that may be a chat endpoint is a proxy asked."""
    url, headers = address_of(access)
    with naming_address(url):
        client = ApiClient(url, headers, proxied=proxied)
    async with client:
        yield EngineApi(client, access, url)


@asynccontextmanager
async def open_control(
    access: EngineAccess, shape: ModelShape | None = None, *, proxied: bool = False
) -> AsyncIterator[EngineControl]:
    """Open the control of an engine that answers and serves the model of `access`."""
    async with open_api(access, proxied=proxied) as api:
        yield EngineControl(api, await api.fetch_model(), shape)
