"""What a dialect must say, and how an engine's problems are told in any of them."""

from collections.abc import Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

from ...errors import UNREADABLE
from ...records.turn import Routes, Sampling
from ..replies.body import BulkString
from ..replies.columns import ReplyColumns
from ..replies.routes import WantedRoutes
from .prompt import Prompt
from .status import LoadGauges


class EngineCall(Struct, frozen=True):
    """A request that takes no prompt."""

    path: str
    body: bytes = b""


class Dialect(Protocol):
    """One engine's way of speaking."""

    name: str
    path: str
    """Where completions are asked for."""

    def request(
        self, model: str, prompt: Prompt, sampling: Sampling, stop_ids: list[int], start: int | None
    ) -> bytes:
        """A request's body; `start` None asks for no routes."""

    def unneeded_chars(self, key: bytes, bulk: BulkString, wanted: WantedRoutes) -> int:
        """How many characters of a bulk hold only positions that are not wanted."""

    def columns(self, rest: bytes | bytearray) -> ReplyColumns:
        """What a reply says beside its bulks."""

    def routes(
        self, bulks: Mapping[bytes, BulkString], wanted: WantedRoutes, num_drawn: int
    ) -> Routes | None:
        """The wanted positions' routes; None if the reply has none."""

    def update_weights(
        self, path: str, version: int
    ) -> tuple[EngineCall, tuple[EngineCall, ...], EngineCall]:
        """How to load new weights: what stops decoding, what loads, what goes on."""

    weight_version: EngineCall
    """Asks which version the engine samples from."""
    gauges: LoadGauges
    """What its metrics call the numbers of its load."""


class _Problem(Struct, frozen=True):
    message: str


class _ErrorReply(Struct, frozen=True):
    error: _Problem


_errors = msgspec.json.Decoder(_ErrorReply)


def problem(status: int, body: bytes | bytearray) -> str:
    """What an error reply says, in one line."""
    try:
        return f"HTTP {status}: {_errors.decode(body).error.message}"
    except UNREADABLE:
        return f"HTTP {status}: {bytes(body[:200]).decode(errors='replace')}"
