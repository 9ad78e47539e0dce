"""Shared by the clients of engines and of chat endpoints: keys, lists of models, small replies."""

import ipaddress
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec
from msgspec import Struct

from ...config.credentials import authorization
from ...errors import UNREADABLE, EngineError, did_you_mean
from .framing import Bytes, HttpAway, HttpError, ReplyHead

MAX_BODY_BYTES = 8 << 20
"""The largest body of a small reply."""
MAX_LISTED_MODELS = 10
"""How many models an error message lists."""
TOO_LARGE_STATUSES = (400, 413, 422)
TOO_LONG_CODE = "context_length_exceeded"
TOO_LONG_WORDS = re.compile(
    r"context (length|window|size)|prompt is too long|too many (input )?tokens|max_model_len",
    re.IGNORECASE,
)
NO_LIST_STATUSES = (404, 405, 501)
"""The answers of an endpoint that does not list its models."""


class ServedModel(Struct, frozen=True):
    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    """The context window: tokens of a prompt and its reply together."""
    root: str | None = None
    """What the server was told to serve: a folder, or a name on the hub."""
    parent: str | None = None
    """The model that this one is an adapter of."""


class _Models(Struct, frozen=True):
    data: list[ServedModel]


class ErrorDetail(Struct, frozen=True):
    message: str | None = None
    param: Any = None
    code: Any = None


class _ErrorReply(Struct, frozen=True):
    error: ErrorDetail


def parse_error(body: Bytes) -> ErrorDetail:
    try:
        return msgspec.json.decode(body, type=_ErrorReply).error
    except UNREADABLE:
        return ErrorDetail()


def is_context_error(status: int, error: ErrorDetail) -> bool:
    """Return whether a request was refused because its prompt and reply do not fit the context window.
    Endpoints have no common sign for that, but much the same words."""
    if status not in TOO_LARGE_STATUSES:
        return False
    return error.code == TOO_LONG_CODE or bool(TOO_LONG_WORDS.search(error.message or ""))


def window_in(error: ErrorDetail) -> int:
    """Return the context window that the text of an error names; 0 if it names none."""
    found = re.search(r"context (?:length|window)\D{0,20}(\d+)", error.message or "")
    return int(found[1]) if found else 0


def describe_error(status: int, body: Bytes) -> str:
    """Return the status and message of an error reply as one line."""
    message = parse_error(body).message
    if message is None:
        message = bytes(body[:200]).decode(errors="replace")
    return f"HTTP {status}: {message}"


def request_headers(key: str, url: str) -> Mapping[str, str]:
    """Return the headers of all requests to an endpoint. A key wins over a password in the URL."""
    proof = f"Bearer {key}" if key else authorization(url)
    return {"User-Agent": "rollway"} | ({"Authorization": proof} if proof else {})


def split_url(url: str) -> SplitResult:
    problem = f"{url!r} is not the address of an HTTP server"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise HttpError(f"{problem}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise HttpError(problem)
    return parts


def find_proxy(url: str) -> str | None:
    """Return the proxy that the environment names for requests to a server: none for this machine."""
    parts = split_url(url)
    host = parts.hostname or ""
    if _is_this_machine(host) or proxy_bypass(host):
        return None
    return getproxies().get(parts.scheme)


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_header(name: str, value: str) -> None:
    """Refuse a value that a header cannot have. The error does not show it: it may be a secret."""
    if not (value.isascii() and value.isprintable()):
        raise HttpError(f"the value for the header {name} is not one line of ASCII text")


class Fetcher(Protocol):
    async def fetch(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[ReplyHead, bytearray]:
        """Return the reply to a request, whatever its status, or raise HttpError."""
        ...


async def fetch_models(http: Fetcher, path: str) -> list[ServedModel] | None:
    """Return the models that an endpoint lists at `path`, or None if it has no list."""
    head, body = await http.fetch("GET", path)
    status = head.status
    if status in NO_LIST_STATUSES:
        return None
    if status != 200:
        error = HttpAway if status in AWAY_STATUSES else HttpError
        raise error(describe_error(status, body))
    return msgspec.json.decode(body, type=_Models).data


def pick_model(models: Sequence[ServedModel], name: str, url: str) -> ServedModel:
    """Return the model called `name`, or the first one if `name` is empty."""
    if not models:
        raise EngineError(f"the engine at {url} serves no model: its list of models is empty")
    if not name:
        return models[0]
    names = [model.id for model in models]
    if name in names:
        return models[names.index(name)]
    listed = ", ".join(names[:MAX_LISTED_MODELS])
    if len(names) > MAX_LISTED_MODELS:
        listed += f" and {len(names) - MAX_LISTED_MODELS} more"
    hint = did_you_mean(name, names)
    raise EngineError(f"no model '{name}' at {url}{hint} (it serves {listed})")


RETRY_STATUSES = (429, 502, 503, 529)
"""Too many requests, a gateway without its server, a server that is full: a later try may succeed."""
AWAY_STATUSES = (502, 503, 504)
"""The answers of an engine, or of its gateway, while the engine is not running."""
LATER_STATUSES = frozenset((*RETRY_STATUSES, *AWAY_STATUSES))
"""The answers of an engine that has not begun with a request, and may take it later."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds that a reply's Retry-After header asks for, as a number or as a date. A
    negative or infinite number counts as no header."""
    text = headers.get("retry-after", "").strip()
    try:
        asked_s = float(text)
        return asked_s if 0 <= asked_s < math.inf else None
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - now).total_seconds())


def back_off_s(num_refused: int, luck: float) -> float:
    """Return the pause after `num_refused` refusals. `luck` (0 to 1) is random and spreads the callers,
    so that they do not all come back at the same moment."""
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_refused - 1, 16))
    return float(longest_s * (0.5 + luck / 2))
