"""A server that speaks the protocol of the Hugging Face hub: it lists the files of a model and sends
them."""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aiohttp import web

from tests.doubles.stand_ins import background

COMMIT = "c0ffee" * 6 + "beef"
CHUNK = 256 << 10


class Hub:
    """Serves one model, called `NAME`. Chunks of its weights are sent every `pause_s`."""

    NAME = "someone/tiny"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = ""
        self.pause_s = 0.0
        self.breaks = False
        """Hang up in the middle of the weights."""
        self.requests: list[str] = []
        """The files that were sent, or begun to be sent."""

    async def start(self) -> None:
        app = web.Application()
        api = f"/api/models/{self.NAME}"
        app.router.add_get(f"{api}/revision/main", self._describe)
        app.router.add_get(f"{api}/tree/{COMMIT}", self._list)
        app.router.add_get(f"/{self.NAME}/resolve/{COMMIT}/{{file}}", self._send)
        app.router.add_route("*", "/{path:.*}", self._refuse)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response({"id": self.NAME, "sha": COMMIT, "siblings": []})

    async def _list(self, request: web.Request) -> web.Response:
        files = [
            {
                "type": "file",
                "path": path.name,
                "size": path.stat().st_size,
                "oid": _oid(path),
            }
            for path in self._folder.iterdir()
        ]
        return web.json_response(files)

    async def _send(self, request: web.Request) -> web.StreamResponse:
        path = self._folder / request.match_info["file"]
        data = path.read_bytes()
        headers = {
            "ETag": f'"{_oid(path)}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(len(data)),
        }
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        if request.method == "GET":
            self.requests.append(path.name)
            for place in range(0, len(data), CHUNK):
                if path.suffix == ".safetensors":
                    await asyncio.sleep(self.pause_s)
                    if self.breaks and request.transport:
                        request.transport.abort()
                with suppress(ConnectionError):
                    await response.write(data[place : place + CHUNK])
        with suppress(ConnectionError):
            await response.write_eof()
        return response

    async def _refuse(self, request: web.Request) -> web.Response:
        headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        return web.json_response(
            {"error": "Repository not found"}, status=404, headers=headers
        )


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def hub_of(folder: Path) -> Iterator[Hub]:
    with background() as loop:
        hub = Hub(folder)
        loop.run(hub.start())
        try:
            yield hub
        finally:
            loop.run(hub.stop())
