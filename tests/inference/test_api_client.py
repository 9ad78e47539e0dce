"""The client for small replies against real servers: what a network puts between it and the server."""

import asyncio
import gzip
import warnings

import pytest
from aiohttp import web

from rollway.inference.http.api_client import ApiClient
from rollway.inference.http.endpoint import MAX_BODY_BYTES
from rollway.inference.http.framing import HttpAway, HttpError
from rollway.testing.engine import served

pytestmark = pytest.mark.anyio

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


def client(url: str, *, proxied: bool = True) -> ApiClient:
    return ApiClient(url, {"Authorization": "Bearer sesame"}, proxied=proxied)


async def echo(request: web.Request) -> web.Response:
    """Say what came, with which key."""
    key = request.headers.get("Authorization", "no key")
    return web.json_response([request.method, key, await request.text()])


async def test_a_compressed_reply_is_read(anyio_backend: str) -> None:
    async def compressed(request: web.Request) -> web.Response:
        assert "gzip" in request.headers["Accept-Encoding"]
        return web.Response(
            body=gzip.compress(b'"small"'), headers={"Content-Encoding": "gzip"}
        )

    app = web.Application()
    app.router.add_get("/", compressed)
    async with served(app) as url, client(url) as http:
        head, body = await http.fetch("GET", "/")
        assert (head.status, bytes(body)) == (200, b'"small"')


async def test_a_reply_that_grows_when_it_is_unpacked_is_given_up() -> None:
    async def bomb(request: web.Request) -> web.Response:
        packed = gzip.compress(bytes(4 * MAX_BODY_BYTES))
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    app = web.Application()
    app.router.add_get("/", bomb)
    async with served(app) as url, client(url) as http:
        with pytest.raises(HttpError, match=f"a body of more than {MAX_BODY_BYTES} bytes"):
            await http.fetch("GET", "/")


async def test_a_redirect_that_keeps_the_body_is_followed() -> None:
    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPPermanentRedirect("/new")

    app = web.Application()
    app.router.add_post("/old", moved)
    app.router.add_post("/new", echo)
    async with served(app) as url, client(url) as http:
        _, body = await http.fetch("POST", "/old", b"hello")
        assert bytes(body) == b'["POST", "Bearer sesame", "hello"]'


async def test_a_redirect_that_loses_the_body_is_an_error_with_the_address() -> None:
    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPFound("/new")

    app = web.Application()
    app.router.add_post("/old", moved)
    app.router.add_get("/new", echo)
    async with served(app) as url, client(url) as http:
        with pytest.raises(HttpError, match=f"it redirects to {url}/new: use that address"):
            await http.fetch("POST", "/old", b"hello")


async def test_a_redirect_to_another_server_does_not_take_the_key_along() -> None:
    other, app = web.Application(), web.Application()
    other.router.add_get("/", echo)
    async with served(other) as target:

        async def elsewhere(request: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(f"{target}/")

        app.router.add_get("/", elsewhere)
        async with served(app) as url, client(url) as http:
            _, body = await http.fetch("GET", "/")
            assert bytes(body) == b'["GET", "no key", ""]'


async def test_redirects_without_an_end_are_an_error() -> None:
    async def again(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/")

    app = web.Application()
    app.router.add_get("/", again)
    async with served(app) as url, client(url) as http:
        with pytest.raises(HttpError, match="it redirected 10 times in a row"):
            await http.fetch("GET", "/")


async def test_a_proxy_is_used_unless_the_server_is_exempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def forward(request: web.Request) -> web.Response:
        return web.Response(text=f"through the proxy to {request.headers['Host']}")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    async with served(app) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        async with client("http://judge.test") as http:
            assert b"to judge.test" in (await http.fetch("GET", "/v1/models"))[1]
        async with client(proxy) as http:
            direct = (await http.fetch("GET", "/"))[1]
        assert direct == f"through the proxy to {proxy.removeprefix('http://')}".encode()
        monkeypatch.setenv("no_proxy", ".test")
        async with client("http://judge.test") as http:
            with pytest.raises(HttpAway, match="cannot connect: "):
                await http.fetch("GET", "/v1/models")
        monkeypatch.delenv("no_proxy")
        async with client("http://judge.test", proxied=False) as http:
            with pytest.raises(HttpAway, match="cannot connect: "):
                await http.fetch("GET", "/v1/models")


async def test_a_proxy_that_is_not_there_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:1")
    async with client("http://judge.test") as http:
        with pytest.raises(
            HttpAway, match=r"cannot connect to the proxy http://\*\*\*@127"
        ) as caught:
            await http.fetch("GET", "/")
        assert "secret" not in str(caught.value)


async def test_a_server_that_hangs_up_or_speaks_no_http_is_an_error() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def chatter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail.test ready\r\n\r\n")
        await reader.read()
        writer.close()

    for behaviour, kind, said in (
        (hang_up, HttpAway, "disconnected"), (chatter, HttpError, "not an HTTP reply"),
    ):  # fmt: skip
        server = await asyncio.start_server(behaviour, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, client(f"http://127.0.0.1:{port}") as http:
            with pytest.raises(kind, match=said):
                await http.fetch("POST", "/", b"{}")


def test_a_client_that_nobody_closes_is_closed_with_its_loop() -> None:
    app = web.Application()
    app.router.add_get("/", echo)

    async def use() -> ApiClient:
        async with served(app) as url:
            http = client(url)
            await http.fetch("GET", "/")
            return http

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        http = asyncio.run(use())
        del http
