"""The process that passes steps on to W&B and TensorBoard. It may block, because nothing waits for it.

It reads `metrics.jsonl` and `evals.jsonl` and notes how far each sink has come. A sink that was down, or
that is new, gets the steps that it lacks when the run is resumed.
"""

import logging
import socket
import tomllib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field

from ..config.specs import SinksSpec
from ..loop.processes.child import receive_spec
from ..rundir.metrics_file import MetricsFile
from ..rundir.rundir import RunDir, write_whole

log = logging.getLogger(__name__)


class MetricsSink(Protocol):
    """Takes the metrics of each step, in order. Calls may block for long."""

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Return once everything that was logged has arrived."""


NOT_VALUES = ("step", "time")
MAX_ERROR = 300


class SinksAnswer(Struct, frozen=True):
    """Every sink is open, or `error` says in one line for the user why one is not."""

    error: str = ""


class SinkPositions(Struct):
    """The last step that each sink has of each file, and the id under which W&B knows the run."""

    wandb_id: str
    last_step: dict[str, int] = field(default_factory=dict)


class MetricsFeed:
    """Passes the complete lines of one file on, each to the sinks that lack it."""

    def __init__(
        self, path: Path, state: Path, sinks: dict[str, MetricsSink], positions: SinkPositions
    ) -> None:
        self._file = MetricsFile(path)
        self._state = state
        self._sinks = {f"{name}/{path.stem}": sink for name, sink in sinks.items()}
        self._positions = positions
        self._end = 0
        newest = self._file.last_step()
        for name in self._sinks:  # a resume may have removed lines, whose steps come again
            positions.last_step[name] = min(newest, positions.last_step.get(name, -1))

    def pass_on(self) -> None:
        """Send the lines that are new since the last call."""
        last_step = self._positions.last_step
        for step, end, line in self._file.lines(self._end):
            self._end = end
            lacking = [name for name in self._sinks if last_step[name] < step]
            if lacking:
                time_s, values = _read_values(line)
                for name in lacking:
                    self._sinks[name].log(step, time_s, values)
                    last_step[name] = step
                save_positions(self._state, self._positions)


def _read_values(line: bytes) -> tuple[float, dict[str, float]]:
    found: dict[str, Any] = msgspec.json.decode(line)
    values = {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and name not in NOT_VALUES
    }
    return float(found.get("time", 0.0)), values


def load_positions(path: Path) -> SinkPositions:
    """Return how far the sinks have come. A new run gets its W&B id here."""
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=SinkPositions)
    positions = SinkPositions(wandb_id=uuid.uuid4().hex[:8])
    save_positions(path, positions)
    return positions


def save_positions(path: Path, positions: SinkPositions) -> None:
    write_whole(path, msgspec.json.encode(positions))


def open_sinks(spec: SinksSpec, run: RunDir, wandb_id: str) -> dict[str, MetricsSink]:
    """Open the sinks that the run file names. Their packages are imported here and nowhere else."""
    sinks: dict[str, MetricsSink] = {}
    if spec.metrics.tensorboard:
        from .tensorboard import TensorBoard

        sinks["tensorboard"] = TensorBoard(run.path / "tensorboard")
    if spec.metrics.wandb_project:
        from .wandb import WeightsAndBiases

        config = tomllib.loads(run.config.read_text())
        project = spec.metrics.wandb_project
        sinks["wandb"] = WeightsAndBiases(project, wandb_id, run.path, config)
    return sinks


def serve(name: str, sock: socket.socket) -> None:
    """Pass on the lines that the files have, then new ones at each frame, until the pipe closes."""
    pipe, spec = receive_spec(sock, SinksSpec)
    run = RunDir(spec.run_dir)
    positions = load_positions(run.sinks)
    try:
        sinks = open_sinks(spec, run, positions.wandb_id)
    except Exception as error:  # W&B and TensorBoard raise anything when they cannot start
        text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR]
        pipe.send(msgspec.msgpack.encode(SinksAnswer(text)))
        return
    feeds = [
        MetricsFeed(path, run.sinks, sinks, positions) for path in (run.metrics, run.evals)
    ]
    pipe.send(msgspec.msgpack.encode(SinksAnswer()))
    is_over = False
    while True:
        for feed in feeds:
            try:
                feed.pass_on()
            except OSError as error:  # a full disk: the next frame is another try
                log.warning("cannot pass steps on: %s", error)
        if is_over:
            break
        is_over = pipe.receive() is None
    for sink in sinks.values():
        sink.close()
