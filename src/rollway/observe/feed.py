"""The process that passes steps on to W&B and TensorBoard: it may block, for nobody waits for it.

It reads `metrics.jsonl` and `evals.jsonl` and notes how far each sink has come, so that one that was
down, or is new, gets what it lacks when the run is resumed.
"""

import socket
import tomllib
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field

from ..config.specs import SinksSpec
from ..rundir.metrics_file import MetricsFile
from ..rundir.rundir import RunDir, write_whole
from ..wire.pipe import BlockingPipe


class MetricsSink(Protocol):
    """Takes the metrics of one step after the other, in order. May block for long."""

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Nothing follows: see that all of it arrives."""


NOT_VALUES = ("step", "time")
MAX_ERROR = 300


class SinksOpened(Struct, frozen=True, tag="opened"):
    """Every sink takes steps."""


class SinksRefused(Struct, frozen=True, tag="refused"):
    """A sink cannot be opened; one line for the user."""

    error: str


SinksAnswer = SinksOpened | SinksRefused


class SinkPosition(Struct):
    """How far each sink has come in each file, and under which id W&B knows the run."""

    wandb_id: str
    last_step: dict[str, int] = field(default_factory=dict)


class MetricsFeed:
    """Passes whole lines of one file on, each to the sinks that lack it."""

    def __init__(
        self, path: Path, state: Path, sinks: dict[str, MetricsSink], told: SinkPosition
    ) -> None:
        self._file = MetricsFile(path)
        self._state = state
        self._sinks = {f"{name}/{path.stem}": sink for name, sink in sinks.items()}
        self._told = told
        self._read = 0
        newest = self._file.last_step()
        for name in self._sinks:  # lines that were taken back come once more
            told.last_step[name] = min(newest, told.last_step.get(name, -1))

    def pass_on(self) -> None:
        for step, end, line in self._file.lines(self._read):
            self._read = end
            lacking = [name for name in self._sinks if self._told.last_step[name] < step]
            if lacking:
                time_s, values = _values(line)
                for name in lacking:
                    self._sinks[name].log(step, time_s, values)
                    self._told.last_step[name] = step
                keep(self._state, self._told)


def _values(line: bytes) -> tuple[float, dict[str, float]]:
    """When a line was written, and its numbers."""
    found: dict[str, Any] = msgspec.json.decode(line)
    values = {
        name: float(value) for name, value in found.items()
        if isinstance(value, int | float) and name not in NOT_VALUES
    }  # fmt: skip
    return float(found.get("time", 0.0)), values


def known(path: Path) -> SinkPosition:
    """What was told before; a run that begins gets its id here."""
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=SinkPosition)
    told = SinkPosition(wandb_id=uuid.uuid4().hex[:8])
    keep(path, told)
    return told


def keep(path: Path, told: SinkPosition) -> None:
    write_whole(path, msgspec.json.encode(told))


def open_sinks(part: SinksSpec, run: RunDir, told: SinkPosition) -> dict[str, MetricsSink]:
    """Those that the run wants. Their packages are imported here and nowhere else."""
    wanted: dict[str, Callable[[], MetricsSink]] = {}
    if part.metrics.tensorboard:
        from .tensorboard import TensorBoard

        wanted["tensorboard"] = partial(TensorBoard, run.path / "tensorboard")
    if part.metrics.wandb_project:
        from .wandb import WeightsAndBiases

        wanted["wandb"] = partial(
            WeightsAndBiases, part.metrics.wandb_project, name=run.path.name, id=told.wandb_id,
            folder=run.path, config=tomllib.loads(run.config.read_text()),
        )  # fmt: skip
    return {name: opened() for name, opened in wanted.items()}


def serve(name: str, sock: socket.socket) -> None:
    """Pass on what is there, then whatever is told to have come, until the parent has no more."""
    pipe = BlockingPipe(sock)
    first = pipe.receive()
    if first is None:
        return
    part = msgspec.msgpack.decode(first, type=SinksSpec)
    run = RunDir(part.run_dir)
    told = known(run.sinks)
    try:
        sinks = open_sinks(part, run, told)
    except Exception as error:  # whatever a package of others raises where it cannot begin
        text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR]
        pipe.send(msgspec.msgpack.encode(SinksRefused(text)))
        return
    feeds = [MetricsFeed(path, run.sinks, sinks, told) for path in (run.metrics, run.evals)]
    pipe.send(msgspec.msgpack.encode(SinksOpened()))
    has_more = True
    while has_more:
        for feed in feeds:
            feed.pass_on()
        has_more = pipe.receive() is not None
    for feed in feeds:
        feed.pass_on()
    for sink in sinks.values():
        sink.close()
