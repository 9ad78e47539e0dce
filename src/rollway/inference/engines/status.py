"""How busy an engine is, read from its metrics without parsing all of them. Pure."""

import math
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from ...errors import UNREADABLE
from ...records.engine import EngineLoad


class LoadGauges(Struct, frozen=True):
    """What an engine calls the numbers of its load."""

    running: bytes
    waiting: bytes
    cache_use: bytes


def load_in(metrics: bytes | bytearray, names: LoadGauges) -> EngineLoad | None:
    """The load in Prometheus's text format; None if it is not told. What several ranks of one engine
    say is added up, but for the cache: the fullest counts."""
    running = list(_values(metrics, names.running))
    waiting = list(_values(metrics, names.waiting))
    if not running or not waiting:
        return None
    cache_use = max(_values(metrics, names.cache_use), default=0.0)
    return EngineLoad(int(sum(running)), int(sum(waiting)), cache_use)


def all_of(loads: Sequence[EngineLoad]) -> EngineLoad | None:
    """Several engines as one."""
    if not loads:
        return None
    return EngineLoad(
        running=sum(one.running for one in loads),
        waiting=sum(one.waiting for one in loads),
        cache_use=max(one.cache_use for one in loads),
    )


def _values(metrics: bytes | bytearray, name: bytes) -> Iterator[float]:
    """What stands behind a name, with or without labels, at the start of a line."""
    at = metrics.find(name)
    while at >= 0:
        end = at + len(name)
        if (at == 0 or metrics[at - 1] == ord("\n")) and metrics[end : end + 1] in (b"{", b" "):
            line_end = metrics.find(b"\n", end)
            value = _value(bytes(metrics[end : line_end if line_end >= 0 else len(metrics)]))
            if math.isfinite(value):
                yield value
        at = metrics.find(name, end)


def _value(line: bytes) -> float:
    """The number behind a metric's labels; a time stamp may follow it."""
    words = line.rpartition(b"}")[2].split()
    try:
        return float(words[0])
    except (IndexError, ValueError):
        return math.nan


UNTOUCHED = ("0", "default")
"""What an engine says that was never given weights: it has those it was started with."""


class _Answer(Struct, frozen=True):
    weight_version: str | int | None = None


def version_in(body: bytes | bytearray) -> str:
    """The version in an engine's answer; empty if it does not say."""
    try:
        said = msgspec.json.decode(body, type=_Answer).weight_version
    except UNREADABLE:
        return ""
    return "" if said is None else str(said)


def is_at(said: str, version: int) -> bool:
    """Whether that is exactly this version."""
    return said == str(version) or (version == 0 and said in UNTOUCHED)


def has_at_least(said: str, version: int) -> bool:
    """Whether that is this version or a later one."""
    return is_at(said, version) or (said.isdigit() and int(said) >= version)
