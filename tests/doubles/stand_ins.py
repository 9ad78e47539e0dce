"""An engine and a trainer without torch, for whole runs whose subject is another part.

Both live in a thread of the test's process. A run that uses them starts in a fraction of the time, and a
test can hold the trainer where it wants to look.
"""

import asyncio
import random
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from rollway.inference.rendering.tokenizer import Tokenizer
from rollway.transport import Batches, Published, open_batches
from tests.doubles.versioned import VersionedEngine

T = TypeVar("T")

DEADLINE_S = 600.0


class Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.begin(work).result(DEADLINE_S)

    def close(self) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()


@contextmanager
def background() -> Iterator[Background]:
    opened = Background()
    try:
        yield opened
    finally:
        opened.close()


class DrawingEngine(VersionedEngine):
    """An engine that draws letters at random, as many as it likes."""

    def __init__(self, letters: Sequence[int], loop: Background, port: int = 0) -> None:
        super().__init__()
        self._port = port
        self._letters = letters
        self._loop = loop
        self._random = random.Random(0)

    @property
    def num_drawn(self) -> int:
        """How many replies it has drawn."""
        return len(self.requests)

    def open(self) -> None:
        """Serve at the same address as before, with the weights of the first start."""
        self.requests.clear()
        self._loop.run(self.start())

    def kill(self) -> None:
        self._loop.run(self.stop())

    async def _complete(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        self.requests.append((body["prompt"], self.version))
        length = self._random.randint(1, body["max_tokens"] - 1)
        ids = [*self._random.choices(self._letters, k=length), body["stop_token_ids"][0]]
        choice = {
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
        }
        return web.json_response({"choices": [choice]})


@contextmanager
def drawing_engines(model: Path, count: int = 1) -> Iterator[list[DrawingEngine]]:
    letters = Tokenizer(str(model)).encode("abcdefghijkl")
    with background() as loop:
        engines = [DrawingEngine(letters, loop) for _ in range(count)]
        try:
            for engine in engines:
                engine.open()
            yield engines
        finally:
            for engine in engines:
                engine.kill()


def draw_forever(model: Path, port: int) -> None:
    """Serve a drawing engine at a port until this process is ended."""
    letters = Tokenizer(str(model)).encode("abcdefghijkl")
    with background() as loop:
        DrawingEngine(letters, loop, port).open()
        signal.pause()


class CopyingTrainer:
    """A trainer that reads every row of a batch and publishes the first weights again."""

    def __init__(self, model: Path, loop: Background) -> None:
        self._model = model
        self._loop = loop
        self._training: Future[None] | None = None
        self._held_at: int | None = None
        self.kl = 0.0
        """The KL that it reports."""

    def hold_at(self, step: int) -> None:
        """Publish nothing from this step on until this is called with a later step, or `release`."""
        self._held_at = step

    def release(self) -> None:
        self._held_at = None

    def begin(self, where: str) -> None:
        """Train the batches of the run at `where`."""
        self.stop()
        self._training = self._loop.begin(self._train(where))

    def stop(self) -> None:
        """Stop where it is, as if it were killed. Raises what went wrong in training."""
        training, self._training = self._training, None
        if training is None:
            return
        training.cancel()
        try:
            training.result(DEADLINE_S)
        except CancelledError:
            return

    async def _train(self, where: str) -> None:
        async with open_batches(where) as batches:
            async for batch in batches:
                await self._train_batch(batches, batch)

    async def _train_batch(self, batches: Batches, batch: Any) -> None:
        manifest, reader = batch.manifest(), batch.reader()
        num_tokens = sum(len(reader.row(row)["token_ids"]) for row in manifest.rows)
        assert num_tokens == manifest.num_tokens > 0
        while self._held_at is not None and batch.step >= self._held_at:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        metrics = {"loss": float(batch.step), "mismatch_kl": self.kl, "time/train": 0.01}
        await batches.publish(Published(batch.version, str(self._model), metrics))


@contextmanager
def copying_trainer(model: Path) -> Iterator[CopyingTrainer]:
    with background() as loop:
        trainer = CopyingTrainer(model, loop)
        try:
            yield trainer
        finally:
            trainer.stop()
