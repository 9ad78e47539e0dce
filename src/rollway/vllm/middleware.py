"""Stands in front of vLLM's API server: demands a key, and sends completions as raw bytes."""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .binary_reply import SAFETENSORS, convert

KEY_VAR = "ROLLWAY_ENGINE_KEY"
"""The environment variable with the key that every request must have. Without it none needs one."""
OPEN_PATHS = {"/health", "/metrics"}
COMPLETIONS = "/v1/completions"
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
            send = BinarySender(send).send
        await self._app(scope, receive, send)


class BinarySender:
    """Passes the messages of one reply on. A whole completion in JSON becomes a safetensors file; errors
    and streams stay as they are."""

    def __init__(self, send: Send) -> None:
        self._send = send
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
        reply, kind = convert(self._body), SAFETENSORS
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
