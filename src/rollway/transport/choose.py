"""Which transport a run uses: the one place that knows there are two."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import zmq
import zmq.asyncio

from ..config.load import load
from ..config.sections import TransportConfig
from ..errors import ConfigError, RunDirError
from ..records.ids import Step
from ..rundir.rundir import RunDir
from ..wire.keys import client_keys
from ..wire.port import open_port
from . import zmq_batches as zmqbatches
from .batch import Batches, BatchSender
from .files import FileBatches, FileSender
from .messages import MAX_TRAINER_BYTES
from .zmq_sender import ZmqSender

MAX_UNREAD = 1000
WINDOW_BYTES = 64 << 20
"""Payload on its way to the trainer at any time."""
UNBOUNDED = 0
"""Messages unsent: what they hold is bounded, by the window and by the batches shipped ahead."""
LAST_WORDS_MS = 1000
"""A trainer hears that its last version was noted, also if the run ends with it."""


@contextmanager
def open_shipping(run: RunDir, wants: TransportConfig, first: Step, last: int) -> Iterator[BatchSender]:
    """The orchestrator's side of the transport that the run file names."""
    zmq_config = wants.zmq
    if zmq_config is None:
        yield FileSender(run)
        return
    with ExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        port = open_port(
            context, stack, zmq_config.bind, zmq_config.keys,
            max_bytes=MAX_TRAINER_BYTES, max_unread=MAX_UNREAD, max_unsent=UNBOUNDED,
        )  # fmt: skip
        port.wire.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        yield ZmqSender(run, port, WINDOW_BYTES, first, last)


@asynccontextmanager
async def open_batches(
    where: str | Path, *, first: int | None = None, landing: str | Path | None = None,
    keys: str | Path | None = None, patience_s: float = 600.0,
) -> AsyncIterator[Batches]:  # fmt: skip
    """The trainer's side: batches of a run, from step `first` or the first that is not trained yet.

    `where` is the run directory, or the address (`tcp://host:port`) that a run with
    `transport.manifests = "zmq"` prints. At an address, `landing` is a folder of the trainer's own for
    payload, which is then sent as frames; without it the trainer opens segments in the run directory.
    `keys` is the folder with the trainer's keys, for an address on another machine. An orchestrator that
    cannot be reached for `patience_s` is given up.
    """
    start = None if first is None else Step(first)
    if str(where).startswith("tcp://"):
        ours = client_keys(Path(keys)) if keys else None
        place = Path(landing) if landing else None
        async with zmqbatches.connect(str(where), place, ours, start, patience_s) as batches:
            yield batches
        return
    if landing or keys:
        raise ConfigError(f"'{where}' is a run directory: landing and keys are for a tcp:// address")
    run = RunDir(where)
    if not run.exists:
        raise RunDirError(f"no run at {run.path}; start it first, or name the address that it prints")
    if start is None:
        start = Step(run.last_published() + 1)
    yield FileBatches(run, start, load(run.config).max_steps)
