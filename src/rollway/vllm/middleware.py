"""Stands in front of vLLM's API server: demands a key, sends completions as raw bytes, and notes which
version drew each token."""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from numpy.typing import NDArray

from .binary_reply import SAFETENSORS, convert
from .token_versions import TokenVersions

KEY_VAR = "ROLLWAY_ENGINE_KEY"
"""The environment variable with the key that every request must have. Without it none needs one."""
OPEN_PATHS = {"/health", "/metrics"}
COMPLETIONS = "/v1/completions"
WORKER_CALLS = "/collective_rpc"
REQUEST_ID = b"x-request-id"
UNAUTHORIZED = b'{"error": {"message": "the key is missing or wrong", "code": 401}}'

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
VersionsOf = Callable[[int], "NDArray[Any] | None"]


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
        headers = dict(scope["headers"])
        if self._needs_key and scope["path"] not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            is_known = hmac.compare_digest(given, self._authorization)
        else:
            is_known = True
        if not is_known:
            await _refuse(scope, send)
            return
        accepts_binary = SAFETENSORS.encode() in headers.get(b"accept", b"")
        if scope["path"] == COMPLETIONS and accepts_binary:
            await self._complete(scope, receive, send)
        elif scope["path"] == WORKER_CALLS:
            await self._app(scope, receive, LoadListener(send, self._versions).send)
        else:
            await self._app(scope, receive, send)

    async def _complete(self, scope: Message, receive: Receive, send: Send) -> None:
        versions, knows_versions = self._versions, _is_only_server(scope)
        name = versions.begin()
        others = [header for header in scope["headers"] if header[0].lower() != REQUEST_ID]
        scope = {**scope, "headers": [*others, (REQUEST_ID, name.encode())]}

        def versions_of(num_tokens: int) -> NDArray[Any] | None:
            return versions.end(name, num_tokens) if knows_versions else None

        try:
            await self._app(scope, receive, BinarySender(send, versions_of).send)
        finally:
            versions.forget(name)


def _is_only_server(scope: Message) -> bool:
    """Return whether all requests come through this process, so that it sees every load."""
    state = getattr(scope.get("app"), "state", None)
    count = getattr(getattr(state, "args", None), "api_server_count", None)
    return count in (None, 1)


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


class BinarySender:
    """Passes the messages of one reply on. A whole completion in JSON becomes a safetensors file; errors
    and streams stay as they are."""

    def __init__(self, send: Send, versions_of: VersionsOf) -> None:
        self._send = send
        self._versions_of = versions_of
        self._start: Message | None = None
        """The head of a reply in JSON, which waits for its body."""
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_json(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole(self._start)

    async def _send_whole(self, start: Message) -> None:
        reply, kind = convert(self._body, self._versions_of), SAFETENSORS
        if reply is None:
            reply, kind = bytes(self._body), "application/json"
        own = {
            b"content-type": kind.encode(),
            b"content-length": str(len(reply)).encode(),
        }
        others = [
            (name, value) for name, value in start["headers"] if name.lower() not in own
        ]
        await self._send({**start, "headers": [*others, *own.items()]})
        await self._send({"type": "http.response.body", "body": reply})


def _is_json(start: Message) -> bool:
    kind: bytes = dict(start.get("headers", ())).get(b"content-type", b"")
    return bool(start["status"] == 200) and kind.startswith(b"application/json")


async def _refuse(scope: Message, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": UNAUTHORIZED})
