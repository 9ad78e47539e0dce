"""Stands in front of vLLM's API server: demands a key, answers completions with raw bytes, and notes
which version drew each token."""

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .binary_reply import SAFETENSORS
from .completion import CompletionOrder, draw, encode_output, parse_order
from .token_versions import TokenVersions

log = logging.getLogger(__name__)

KEY_VAR = "ROLLWAY_ENGINE_KEY"
"""The environment variable with the key that every request must have. Without it none needs one."""
OPEN_PATHS = {"/health", "/metrics"}
COMPLETIONS = "/v1/completions"
WORKER_CALLS = "/collective_rpc"
UNAUTHORIZED = b'{"error": {"message": "the key is missing or wrong", "code": 401}}'

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Middleware:
    """An ASGI middleware. vLLM's own `--api-key` leaves open the paths that pause it and load weights;
    this one closes them, too."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._authorization = f"Bearer {os.environ.get(KEY_VAR, '')}".encode()
        self._needs_key = bool(os.environ.get(KEY_VAR))
        self._versions = TokenVersions()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), scope["path"]
        if self._needs_key and path not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._authorization):
                await _refuse(scope, send)
                return
        if path == COMPLETIONS and SAFETENSORS.encode() in headers.get(b"accept", b""):
            await self._complete(scope, receive, send)
        elif path == WORKER_CALLS:
            await self._app(scope, receive, LoadListener(send, self._versions).send)
        else:
            await self._app(scope, receive, send)

    async def _complete(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer with raw bytes. Whatever is in the way of that is left to vLLM's own server."""
        body, state = await _read(receive), getattr(scope.get("app"), "state", None)
        server = getattr(state, "openai_serving_completion", None)
        order = parse_order(body, server) if server is not None else None
        is_open = self._needs_key or not _demands_key(state)
        if order is not None and is_open:
            versions = self._versions if _sees_all_loads(state) else TokenVersions()
            if await _answer(server, order, versions, receive, send):
                return
        await self._app(scope, _replaying(body, receive), send)


def _demands_key(state: Any) -> bool:
    """Return whether vLLM's own server checks a key, which it does behind this middleware."""
    args = getattr(state, "args", None)
    return bool(getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY"))


def _sees_all_loads(state: Any) -> bool:
    """Return whether all loads pass this process and tell of all engines: not with several API servers,
    and not with data parallelism."""
    args = getattr(state, "args", None)
    is_only = getattr(args, "api_server_count", None) in (None, 1)
    return is_only and getattr(args, "data_parallel_size", 1) in (None, 1)


async def _answer(
    server: Any,
    order: CompletionOrder,
    versions: TokenVersions,
    receive: Receive,
    send: Send,
) -> bool:
    """Draw a reply and send it, unless the client leaves. Return False if vLLM cannot draw it."""
    name = versions.begin()
    drawing = asyncio.ensure_future(draw(server, order, name))
    leaving = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait([drawing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not drawing.done():
            return True
        if (error := drawing.exception()) is not None:
            log.warning("vLLM's own server answers, because of %r", error)
            return False
        output = drawing.result()
        reply = encode_output(output, versions.end(name, len(output.token_ids)))
    finally:
        versions.forget(name)
        drawing.cancel()
        leaving.cancel()
        await asyncio.gather(drawing, leaving, return_exceptions=True)
    headers = [
        (b"content-type", SAFETENSORS.encode()),
        (b"content-length", str(len(reply)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply})
    return True


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body which was read already, then what really comes."""
    unread = [body]

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replay


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class LoadListener:
    """Passes the messages of one reply on, and notes the load that it tells of."""

    def __init__(self, send: Send, versions: TokenVersions) -> None:
        self._send = send
        self._versions = versions
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                self._versions.note_load(self._body)
        await self._send(message)


async def _refuse(scope: Message, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": UNAUTHORIZED})
