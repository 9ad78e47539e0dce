"""The client against real servers: whole replies, chunks, torn ones, servers that hang up."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollway.inference.http.client import HttpClient, HttpReply
from rollway.inference.http.framing import ChunkedBody, HttpError, parse_head

pytestmark = pytest.mark.anyio

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served_by(serve: Serve) -> AsyncIterator[HttpClient]:
    ended: list[asyncio.Future[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.get_running_loop().create_future())
        mine = ended[-1]
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        mine.set_result(None)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client
    finally:
        client.close()
        server.close()
        await asyncio.gather(*ended)


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """The body of the next request; EOF raises."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def text_of(reply: HttpReply) -> bytes:
    body = bytearray()
    await reply.read(lambda buffer, start, end: body.extend(buffer[start:end]))
    return bytes(body)


def replying(*replies: bytes, close: bool = False) -> Serve:
    """Answers a connection's requests one after the other, each in small pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            await request_of(reader)
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
async def test_replies_of_every_framing_and_the_next_on_the_same_connection(
    reply: bytes, text: bytes
) -> None:
    async with served_by(replying(reply, reply)) as client:
        for _ in range(2):
            async with client.request("POST", "/", b"{}") as answer:
                assert await text_of(answer) == text
        assert len(client._idle) == 1


async def test_a_body_that_ends_with_its_connection() -> None:
    async with served_by(replying(b"HTTP/1.0 200 OK\r\n\r\nhello", close=True)) as client:
        async with client.request("GET", "/") as answer:
            assert await text_of(answer) == b"hello"
        assert not client._idle


async def test_large_bodies_wait_until_they_are_read() -> None:
    body = bytes(range(256)) * 40_000
    reply = OK + f"Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(reply)
        await reader.read()

    async with (
        served_by(serve) as client,
        client.request("POST", "/a") as first,
        client.request("POST", "/b") as second,
    ):
        assert await text_of(second) == body
        assert await text_of(first) == body


@pytest.mark.parametrize(
    ("reply", "said"),
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
async def test_broken_replies_are_errors(reply: bytes, said: str) -> None:
    async with served_by(replying(reply, close=True)) as client:
        with pytest.raises(HttpError, match=said):
            async with client.request("POST", "/", b"{}") as answer:
                await text_of(answer)


async def test_a_connection_whose_server_says_more_than_it_announced_is_not_used_again() -> None:
    reply = OK + b"Content-Length: 2\r\n\r\nhi"
    junk = reply + b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"
    for first in (junk, CHUNKED + b"2\r\nhi\r\n0\r\n\r\nmore"):
        async with served_by(replying(first)) as client:
            for _ in range(2):
                async with client.request("POST", "/", b"{}") as answer:
                    assert await text_of(answer) == b"hi"


async def test_a_body_without_length_that_is_torn_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK + b"\r\nhalf of it")
        await writer.drain()
        now = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        writer.transport.abort()

    async with served_by(serve) as client:
        with pytest.raises(HttpError):
            async with client.request("POST", "/", b"{}") as answer:
                await text_of(answer)


async def test_a_server_that_hung_up_on_an_idle_connection_is_asked_again() -> None:
    once = replying(OK + b"Content-Length: 2\r\n\r\nhi", close=True)
    async with served_by(once) as client:
        for _ in range(3):
            async with client.request("POST", "/", b"{}") as answer:
                assert await text_of(answer) == b"hi"


async def test_a_cancelled_reader_ends_the_connection() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        with suppress(ConnectionError):
            await reader.read()
        gone.set()

    async with served_by(serve) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), client.request("POST", "/", b"{}"):
                pass
        await gone.wait()


async def test_nobody_there() -> None:
    with pytest.raises(HttpError, match="cannot connect"):
        async with HttpClient("http://127.0.0.1:1").request("GET", "/"):
            pass
    for url in ("ftp://host", "http://", "http://host:99999", "http://host:no", "http://[::1"):
        with pytest.raises(HttpError, match="not the address of an HTTP server"):
            HttpClient(url)


@given(chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=8), step=st.integers(1, 50))
def test_chunks_in_pieces_of_any_size(chunks: list[bytes], step: int) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + b"0\r\n\r\n"
    got = bytearray()
    body = ChunkedBody(lambda buffer, start, end: got.extend(buffer[start:end]))
    for start in range(0, len(wire), step):
        body.feed(wire, start, min(start + step, len(wire)))
    assert body.done
    assert bytes(got) == b"".join(chunks)


def test_heads() -> None:
    head = parse_head(b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\nConnection: close")
    assert head.status == 404
    assert head.headers["content-type"] == "text/plain"
    assert head.closes


class Middle:
    """Keeps the first and last bytes of a body and says that it can do without those between."""

    def __init__(self, first: int, unneeded: int) -> None:
        self._first, self._unneeded = first, unneeded
        self.kept = bytearray()
        self.num_skipped = 0

    def feed(self, buffer: bytes | bytearray, start: int, end: int) -> None:
        self.kept += buffer[start:end]

    @property
    def num_unneeded(self) -> int:
        seen = len(self.kept) + self.num_skipped
        return max(0, self._first + self._unneeded - seen) if seen >= self._first else 0

    def skip(self, num_bytes: int) -> None:
        self.num_skipped += num_bytes


@pytest.mark.parametrize("num_pieces", [1, 7])
async def test_what_a_sink_can_do_without_stays_in_the_kernel(num_pieces: int) -> None:
    body = b"a" * 1000 + b"-" * (9 << 20) + b"z" * 1000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await request_of(reader)
            writer.write(OK + f"Content-Length: {len(body)}\r\n\r\n".encode())
            size = len(body) // num_pieces + 1
            for start in range(0, len(body), size):
                writer.write(body[start : start + size])
                await writer.drain()
                await asyncio.sleep(0.01)

    async with served_by(serve) as client:
        for _ in range(2):  # the second on the same connection, which must be as it was
            sink = Middle(1000, 9 << 20)
            async with client.request("GET", "/") as reply:
                await reply.read(sink.feed, sink)
            assert sink.kept.replace(b"-", b"") == b"a" * 1000 + b"z" * 1000
            assert len(sink.kept) + sink.num_skipped == len(body)
            assert sink.num_skipped > 8 << 20


@pytest.mark.parametrize("length", [3 << 20, 600 << 10, 400 << 10])
async def test_a_body_that_filled_the_kernels_buffer_is_thrown_away_too(length: int) -> None:
    """Its server can send nothing more until enough was read: nothing may wait for more to come."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK + f"Content-Length: {length}\r\n\r\n".encode() + b"-" * length)
        await writer.drain()
        await reader.read()

    async def wait_and_read(client: HttpClient) -> int:
        sink = Middle(1000, 1 << 30)
        async with client.request("GET", "/") as reply:
            await asyncio.sleep(0.3)
            await reply.read(sink.feed, sink)
        return len(sink.kept) + sink.num_skipped

    async with served_by(serve) as client, asyncio.timeout(20):
        assert await asyncio.gather(*(wait_and_read(client) for _ in range(4))) == [length] * 4


@pytest.mark.parametrize("ends", [True, False])
async def test_a_server_that_hangs_up_while_its_words_are_thrown_away(ends: bool) -> None:
    body = b"a" * 1000 + b"-" * (4 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        length = len(body) if ends else 2 * len(body)
        writer.write(OK + f"Content-Length: {length}\r\n\r\n".encode() + body)
        await writer.drain()

    async with served_by(serve) as client, client.request("GET", "/") as reply:
        sink = Middle(1000, 1 << 30)
        if ends:
            await reply.read(sink.feed, sink)
            assert len(sink.kept) + sink.num_skipped == len(body)
        else:
            with pytest.raises(HttpError, match="closed"):
                await reply.read(sink.feed, sink)


async def test_a_reader_that_leaves_while_bytes_are_thrown_away_leaves_nothing_behind() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK + b"Content-Length: 99999999\r\n\r\n" + b"a" * (2 << 20))
        await writer.drain()
        await reader.read()

    async with served_by(serve) as client:
        sink = Middle(1000, 1 << 30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), client.request("GET", "/") as reply:
                await reply.read(sink.feed, sink)
        assert sink.num_skipped > 0 or len(sink.kept) > 0
