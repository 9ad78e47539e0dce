"""The HTTP client against real servers: every framing, broken replies, closed connections."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.inference.http.client import HttpClient, HttpReply
from rollway.inference.http.connection import IDLE_S
from rollway.inference.http.framing import ChunkedBody, HttpAway, HttpError, parse_head

pytestmark = pytest.mark.anyio

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def client_of(serve: Serve, idle_s: float = IDLE_S) -> AsyncIterator[HttpClient]:
    """A client of a server that handles each connection with `serve`."""
    ended: list[asyncio.Future[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection_ended = asyncio.get_running_loop().create_future()
        ended.append(connection_ended)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        connection_ended.set_result(None)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = HttpClient(url, idle_s=idle_s)
    try:
        yield client
    finally:
        client.close()
        server.close()
        await asyncio.gather(*ended)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next request. Raises IncompleteReadError if there is none."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def read_text(reply: HttpReply) -> bytes:
    body = bytearray()
    await reply.read(lambda buffer, start, end: body.extend(buffer[start:end]))
    return bytes(body)


def reply_with(*replies: bytes, close: bool = False) -> Serve:
    """Answer a connection's requests one after the other, each in small pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            await read_request(reader)
            for start in range(0, len(reply), 7):
                writer.write(reply[start : start + 7])
                await writer.drain()
        if not close:
            await reader.read()

    return serve


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (OK + b"content-length: 0\r\n\r\n", b""),
        (CHUNKED + b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: 1\r\n\r\n", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)  # fmt: skip
async def test_a_connection_is_used_again_after_a_reply_of_any_framing(
    reply: bytes, text: bytes
) -> None:
    async with client_of(reply_with(reply, reply)) as client:
        for _ in range(2):
            async with client.request("POST", "/", b"{}") as answer:
                assert await read_text(answer) == text
        assert len(client._idle) == 1


async def test_a_body_may_end_with_its_connection() -> None:
    async with client_of(reply_with(b"HTTP/1.0 200 OK\r\n\r\nhello", close=True)) as client:
        async with client.request("GET", "/") as answer:
            assert await read_text(answer) == b"hello"
        assert not client._idle


async def test_a_large_body_waits_until_it_is_read() -> None:
    body = bytes(range(256)) * 40_000
    reply = OK + f"Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(reply)
        await reader.read()

    async with (
        client_of(serve) as client,
        client.request("POST", "/a") as first,
        client.request("POST", "/b") as second,
    ):
        assert await read_text(second) == body
        assert await read_text(first) == body


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP reply"),
        (b"HTTP/1.1 2\xb20 OK\r\n\r\n", "not an HTTP reply"),
        (OK + b"Content-Length: ten\r\n\r\n", "Content-Length"),
        (OK + b"Content-Length: 10\r\n\r\nhalf", "closed the connection"),
        (CHUNKED + b"zz\r\n", "chunk's size"),
        (CHUNKED + b"-5\r\n", "chunk's size"),
        (b"", "closed the connection"),
    ],
)
async def test_broken_replies_are_errors(reply: bytes, message: str) -> None:
    async with client_of(reply_with(reply, close=True)) as client:
        with pytest.raises(HttpError, match=message):
            async with client.request("POST", "/", b"{}") as answer:
                await read_text(answer)


@pytest.mark.parametrize("head", [OK + b"Content-Length: 9\r\n\r\n", CHUNKED, OK + b"\r\n"])
async def test_a_server_that_stops_in_the_middle_of_a_body_is_given_up(head: bytes) -> None:
    serve = reply_with(head + b"5\r\nhalf")
    async with client_of(serve, idle_s=0.2) as client, asyncio.timeout(10):
        with pytest.raises(
            HttpAway, match=r"sent nothing for 0\.2 s in the middle"
        ) as caught:
            async with client.request("POST", "/", b"{}") as answer:
                await read_text(answer)
        assert caught.value.request_was_sent


async def test_a_server_may_be_slow_as_long_as_it_sends_something() -> None:
    """The whole body takes longer than the server may pause."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"Content-Length: 5\r\n\r\n")
        for letter in b"hello":
            await asyncio.sleep(0.4)
            writer.write(bytes([letter]))
        await reader.read()

    async with client_of(serve, idle_s=1.2) as client, client.request("GET", "/") as answer:
        assert await read_text(answer) == b"hello"


async def test_a_connection_is_not_used_again_if_the_server_sends_more_than_it_announced() -> (
    None
):
    reply = OK + b"Content-Length: 2\r\n\r\nhi"
    junk = reply + b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"
    for first in (junk, CHUNKED + b"2\r\nhi\r\n0\r\n\r\nmore"):
        async with client_of(reply_with(first)) as client:
            for _ in range(2):
                async with client.request("POST", "/", b"{}") as answer:
                    assert await read_text(answer) == b"hi"


async def test_a_body_without_length_is_an_error_if_the_connection_breaks() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"\r\nhalf of it")
        await writer.drain()
        now = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        writer.transport.abort()

    async with client_of(serve) as client:
        with pytest.raises(HttpError):
            async with client.request("POST", "/", b"{}") as answer:
                await read_text(answer)


async def test_a_request_is_sent_again_if_the_server_closed_the_idle_connection() -> None:
    once = reply_with(OK + b"Content-Length: 2\r\n\r\nhi", close=True)
    async with client_of(once) as client:
        for _ in range(3):
            async with client.request("POST", "/", b"{}") as answer:
                assert await read_text(answer) == b"hi"


async def test_a_cancelled_request_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        with suppress(ConnectionError):
            await reader.read()
        gone.set()

    async with client_of(serve) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), client.request("POST", "/", b"{}"):
                pass
        await gone.wait()


async def test_an_address_without_a_server_is_an_error() -> None:
    with pytest.raises(HttpError, match="cannot connect"):
        async with HttpClient("http://127.0.0.1:1").request("GET", "/"):
            pass
    for url in (
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host:no",
        "http://[::1",
    ):
        with pytest.raises(HttpError, match="not the address of an HTTP server"):
            HttpClient(url)


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=8), size=st.integers(1, 50)
)
def test_chunks_may_arrive_in_pieces_of_any_size(chunks: list[bytes], size: int) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    received = bytearray()
    body = ChunkedBody(lambda buffer, start, end: received.extend(buffer[start:end]))
    for start in range(0, len(wire), size):
        body.feed(wire, start, min(start + size, len(wire)))
    assert body.done
    assert bytes(received) == b"".join(chunks)


def test_a_head_is_parsed_into_status_and_headers() -> None:
    head = parse_head(
        b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\nConnection: close"
    )
    assert head.status == 404
    assert head.headers["content-type"] == "text/plain"
    assert head.closes


class SinkWithGap:
    """Keeps the first bytes of a body and those after the gap, and does not need those within it."""

    def __init__(self, first: int, unneeded: int) -> None:
        self._first, self._unneeded = first, unneeded
        self.kept = bytearray()
        self.num_skipped = 0

    def feed(self, buffer: bytes | bytearray, start: int, end: int) -> None:
        self.kept += buffer[start:end]

    @property
    def num_unneeded(self) -> int:
        position = len(self.kept) + self.num_skipped
        if position < self._first:
            return 0
        return max(0, self._first + self._unneeded - position)

    def skip(self, num_bytes: int) -> None:
        self.num_skipped += num_bytes


@pytest.mark.parametrize("num_pieces", [1, 7])
async def test_bytes_that_a_sink_does_not_need_are_thrown_away_in_the_kernel(
    num_pieces: int,
) -> None:
    body = b"a" * 1000 + b"-" * (9 << 20) + b"z" * 1000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await read_request(reader)
            writer.write(OK + f"Content-Length: {len(body)}\r\n\r\n".encode())
            size = len(body) // num_pieces + 1
            for start in range(0, len(body), size):
                writer.write(body[start : start + size])
                await writer.drain()
                await asyncio.sleep(0.01)

    async with client_of(serve) as client:
        for _ in range(
            2
        ):  # the second time on the same connection, which must work as before
            sink = SinkWithGap(1000, 9 << 20)
            async with client.request("GET", "/") as reply:
                await reply.read(sink.feed, sink)
            assert sink.kept.replace(b"-", b"") == b"a" * 1000 + b"z" * 1000
            assert len(sink.kept) + sink.num_skipped == len(body)
            assert sink.num_skipped > 8 << 20


@pytest.mark.parametrize("length", [3 << 20, 600 << 10, 400 << 10])
async def test_a_body_that_filled_the_kernels_buffer_can_be_thrown_away(length: int) -> None:
    """The server cannot send more until bytes are read, so the client must not wait for more bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + f"Content-Length: {length}\r\n\r\n".encode() + b"-" * length)
        await writer.drain()
        await reader.read()

    async def read_late(client: HttpClient) -> int:
        sink = SinkWithGap(1000, 1 << 30)
        async with client.request("GET", "/") as reply:
            await asyncio.sleep(
                0.3
            )  # until the kernel's buffer is full, which nothing reports
            await reply.read(sink.feed, sink)
        return len(sink.kept) + sink.num_skipped

    async with client_of(serve) as client, asyncio.timeout(20):
        assert await asyncio.gather(*(read_late(client) for _ in range(4))) == [length] * 4


@pytest.mark.parametrize("ends", [True, False])
async def test_a_server_may_close_the_connection_while_its_bytes_are_thrown_away(
    ends: bool,
) -> None:
    body = b"a" * 1000 + b"-" * (4 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        length = len(body) if ends else 2 * len(body)
        writer.write(OK + f"Content-Length: {length}\r\n\r\n".encode() + body)
        await writer.drain()

    async with client_of(serve) as client, client.request("GET", "/") as reply:
        sink = SinkWithGap(1000, 1 << 30)
        if ends:
            await reply.read(sink.feed, sink)
            assert len(sink.kept) + sink.num_skipped == len(body)
        else:
            with pytest.raises(HttpError, match="closed"):
                await reply.read(sink.feed, sink)


async def test_a_request_may_be_cancelled_while_bytes_are_thrown_away() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"Content-Length: 99999999\r\n\r\n" + b"a" * (2 << 20))
        await writer.drain()
        await reader.read()

    async with client_of(serve) as client:
        sink = SinkWithGap(1000, 1 << 30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), client.request("GET", "/") as reply:
                await reply.read(sink.feed, sink)
        assert sink.num_skipped > 0 or len(sink.kept) > 0
