"""Writes steps as event files for TensorBoard. Each start of a run adds a file."""

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """A folder of event files. The values are on disk when `log` returns."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        summary = Summary(
            value=[
                Summary.Value(tag=name, simple_value=value) for name, value in values.items()
            ]
        )
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
