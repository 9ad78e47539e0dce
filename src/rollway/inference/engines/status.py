"""Reads an engine's load from its metrics, and its version from its answer. Pure."""

import math
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from ...errors import UNREADABLE
from ...records.engine import EngineLoad
from ..http.framing import Bytes


class LoadGauges(Struct, frozen=True):
    running: bytes
    waiting: bytes
    cache_use: bytes


def parse_load(metrics: Bytes, names: LoadGauges) -> EngineLoad | None:
    """Read the load from metrics in Prometheus's text format. None means that the metrics lack it. The
    requests of an engine's ranks are added up. For the cache the fullest rank counts."""
    running = list(_values(metrics, names.running))
    waiting = list(_values(metrics, names.waiting))
    if not running or not waiting:
        return None
    cache_use = max(_values(metrics, names.cache_use), default=0.0)
    return EngineLoad(int(sum(running)), int(sum(waiting)), cache_use)


def sum_loads(loads: Sequence[EngineLoad]) -> EngineLoad | None:
    if not loads:
        return None
    return EngineLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        cache_use=max(load.cache_use for load in loads),
    )


def _values(metrics: Bytes, name: bytes) -> Iterator[float]:
    """Yield the finite values of a metric. Searching for its name avoids parsing all the others."""
    at = metrics.find(name)
    while at >= 0:
        end = at + len(name)
        begins_line = at == 0 or metrics[at - 1] == ord("\n")
        if begins_line and metrics[end : end + 1] in (b"{", b" "):
            line_end = metrics.find(b"\n", end)
            if line_end < 0:
                line_end = len(metrics)
            value = _parse_value(bytes(metrics[end:line_end]))
            if math.isfinite(value):
                yield value
        at = metrics.find(name, end)


def _parse_value(line: bytes) -> float:
    """Return the number after a metric's labels. A time stamp may follow it."""
    words = line.rpartition(b"}")[2].split()
    try:
        return float(words[0])
    except (IndexError, ValueError):
        return math.nan


class _WeightInfo(Struct, frozen=True):
    weight_version: str | int | None = None


def parse_version(body: Bytes) -> str:
    """Return the version in an engine's answer, or an empty string if there is none."""
    try:
        version = msgspec.json.decode(body, type=_WeightInfo).weight_version
    except UNREADABLE:
        return ""
    return "" if version is None else str(version)


def is_at_least(reported: str, version: int) -> bool:
    """Return whether an engine has a version that was checked. One that has just been started reports
    another text, such as `default`."""
    return reported.isdigit() and int(reported) >= version
