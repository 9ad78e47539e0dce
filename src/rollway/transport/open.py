"""Opens either end of a transport. Only this module knows that there are two: files and a socket."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import zmq
from zmq.asyncio import Context

from ..config.address import IPC
from ..config.load import load
from ..config.sections import TransportConfig
from ..errors import ConfigError, RunDirError
from ..records.ids import Step
from ..rundir.rundir import RunDir
from ..wire.keys import read_client_keys
from ..wire.port import PortBounds, open_port
from .batch import Batches, BatchSender
from .files import FileBatches, FileSender
from .messages import MAX_TRAINER_BYTES
from .zmq_batches import connect
from .zmq_sender import ZmqSender

WINDOW_BYTES = 64 << 20
"""The largest amount of payload that is on its way to the trainer."""
MAX_UNREAD = 1000
UNBOUNDED = 0
"""No limit of unsent messages is needed: the window and the batches shipped ahead bound their bytes."""
LINGER_MS = 1000
"""How long the end of a run waits until its last messages have reached the trainer."""


@contextmanager
def open_sender(
    run: RunDir,
    config: TransportConfig,
    first: Step,
    last: int,
    window_bytes: int = WINDOW_BYTES,
) -> Iterator[BatchSender]:
    """Open the orchestrator's end of the transport, for steps `first` to `last`."""
    if config.zmq is None:
        yield FileSender(run)
        return
    with ExitStack() as stack:
        context = stack.enter_context(Context())
        bounds = PortBounds(MAX_TRAINER_BYTES, MAX_UNREAD, UNBOUNDED)
        port = open_port(context, stack, config.zmq.bind, config.zmq.keys, bounds)
        port.wire.setsockopt(zmq.LINGER, LINGER_MS)
        yield ZmqSender(run, port, window_bytes, first, last)


@asynccontextmanager
async def open_batches(
    where: str | Path,
    *,
    first: int | None = None,
    landing: str | Path | None = None,
    keys: str | Path | None = None,
    patience_s: float = 600.0,
) -> AsyncIterator[Batches]:
    """Open the batches of a run, for a trainer. Iterate over the result, and `publish` each version.

    `where` is the run directory, or the address (`ipc://path` or `tcp://host:port`) that a run with
    `[transport.zmq]` prints. Batches begin at step `first`, or at the first that is not trained yet. The
    other arguments are for an address only:

    `landing` is a folder of the trainer's machine to which payload is sent. Without it the trainer opens
    segments in the run directory, which must be on a file system that both machines share.
    `keys` is the folder with the trainer's keys, which every `tcp://` address requires.
    `patience_s` is how long an orchestrator may be unreachable before ProtocolError is raised.
    """
    first_step = None if first is None else Step(first)
    if str(where).startswith(("tcp://", IPC)):
        trainer_keys = read_client_keys(Path(keys)) if keys else None
        folder = Path(landing) if landing else None
        async with connect(
            str(where), folder, trainer_keys, first_step, patience_s
        ) as batches:
            yield batches
        return
    if landing or keys:
        raise ConfigError(
            f"'{where}' is a run directory: landing and keys are for the address of a run"
        )
    run = RunDir(where)
    if not run.exists:
        raise RunDirError(
            f"no run at {run.path}; start it first, or give the address that it prints"
        )
    if first_step is None:
        first_step = Step(run.last_published() + 1)
    yield FileBatches(run, first_step, load(run.config).max_steps)
