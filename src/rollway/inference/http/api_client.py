"""Small requests to one server, through aiohttp: proxies, compressed replies and redirects work.

Replies of many megabytes have a client of their own (`client.py`).
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Self

import aiohttp
from aiohttp import ClientResponse, ClientSession

from ...config.credentials import hide_credentials
from .endpoint import MAX_BODY_BYTES, check_header, find_proxy, split_url
from .framing import JSON, HttpAway, HttpError, ReplyHead

KEEP_S = 4.0
"""How long an idle connection is kept. Servers close theirs after 5 s or more: a request on a connection
that the server is closing would be lost."""


class ApiClient:
    """Sends small requests to one server, all with the same `headers`. If it is `proxied`, it obeys
    HTTP_PROXY, HTTPS_PROXY and NO_PROXY, except for addresses of this machine. It is closed with its
    event loop at the latest."""

    def __init__(self, url: str, headers: Mapping[str, str], *, proxied: bool) -> None:
        split_url(url)
        for name, value in headers.items():
            check_header(name, value)
        self._base = url.rstrip("/")
        self._headers = {"Accept": JSON, "Content-Type": JSON, **headers}
        self._proxy = find_proxy(url) if proxied else None
        self._life: AsyncGenerator[ClientSession] | None = None
        self._session: ClientSession | None = None

    async def fetch(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[ReplyHead, bytearray]:
        """Return the reply to a request, whatever its status, or raise HttpError."""
        session, url = self._session or await self._open(), f"{self._base}{path}"
        data = None if method == "GET" else body
        try:
            async with session.request(method, url, data=data) as reply:
                if (
                    reply.method != method
                ):  # an old habit of clients: the body is not sent again
                    target = hide_credentials(str(reply.url))
                    raise HttpError(f"it redirects to {target}: use that address")
                return _head_of(reply), await _read(reply)
        except aiohttp.ClientHttpProxyError as error:
            answer = f"HTTP {error.status}: {error.message}"
            raise HttpAway(f"the proxy {self._shown_proxy} answers {answer}") from None
        except aiohttp.ClientProxyConnectionError as error:
            proxy = self._shown_proxy
            raise HttpAway(f"cannot connect to the proxy {proxy}: {error.os_error}") from None
        except aiohttp.ClientConnectorError as error:
            raise HttpAway(f"cannot connect: {error.os_error}") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            text = str(error) or "the server closed the connection"
            raise HttpAway(text, request_was_sent=True) from None
        except aiohttp.TooManyRedirects as error:
            raise HttpError(f"it redirected {len(error.history)} times in a row") from None
        except aiohttp.ClientError as error:
            raise HttpError(f"this is not an HTTP reply: {error}") from None

    @property
    def _shown_proxy(self) -> str:
        return hide_credentials(self._proxy or "")

    async def _open(self) -> ClientSession:
        """Open the session. asyncio closes all asynchronous generators of a loop when the loop ends."""
        self._life = _session(self._headers, self._proxy)
        self._session = await anext(self._life)
        return self._session

    async def close(self) -> None:
        if self._life is not None:
            await self._life.aclose()
            self._life = self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _session(
    headers: Mapping[str, str], proxy: str | None
) -> AsyncGenerator[ClientSession]:
    async with ClientSession(
        # aiohttp opens 100 connections at most, unless it is told otherwise
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        proxy=proxy,
        timeout=aiohttp.ClientTimeout(total=None),  # callers have deadlines of their own
    ) as session:
        yield session


def _head_of(reply: ClientResponse) -> ReplyHead:
    headers = {name.lower(): value for name, value in reply.headers.items()}
    return ReplyHead(reply.status, headers)


async def _read(reply: ClientResponse) -> bytearray:
    """Read a body, which may be compressed. What it would need above MAX_BODY_BYTES is never made."""
    body = bytearray()
    async for piece in reply.content.iter_any():
        if len(body) + len(piece) > MAX_BODY_BYTES:
            raise HttpError(f"the reply has a body of more than {MAX_BODY_BYTES} bytes")
        body += piece
    return body
