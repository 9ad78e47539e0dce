"""What every bench prints and writes: a table, ratio lines, one line of JSON."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollway.config.specs import WatchSpec
from rollway.loop.watch.lag import FINEST_S, GROWTH
from rollway.records.lag import LagStats

QUIET = WatchSpec(stall_ms=1e6, warn_p90_ms=None, warn_p99_ms=None, warn_max_ms=None)
"""A bench prints lag itself, so its processes log no warnings about it."""
LATE_S = 0.005
"""A tick later than this counts as blocked: about a control's p99."""


def arguments(doc: str | None, **defaults: tuple[Any, str]) -> argparse.Namespace:
    """--full, --json, --strictness, and one option per default."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="the full size, not a minute's worth"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the same figures as JSON"
    )
    parser.add_argument(
        "--strictness", type=float, default=1.0, metavar="X",
        help="make every bar X times as hard: with 1000 nothing passes (default 1)",
    )  # fmt: skip
    for name, (value, help) in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=type(value), default=value, help=f"{help} (default {value})"
        )
    return parser.parse_args()


class Bars:
    """What a bench promises. It prints the figures that miss their bars, and then ends with 1."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._strictness = args.strictness
        self._missed: list[str] = []

    def at_most(self, what: str, value: float, bar: float) -> None:
        bar /= self._strictness
        if value > bar:
            self._missed.append(f"{what} is {value:.3g}, and may be {bar:.3g} at most")

    def at_least(self, what: str, value: float, bar: float) -> None:
        bar *= self._strictness
        if value < bar:
            self._missed.append(f"{what} is {value:.3g}, and must be {bar:.3g} at least")

    def check(self) -> None:
        if self._missed:
            raise SystemExit("\n".join(["", "MISSED:", *self._missed]))


def table(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> None:
    """One line per row; `columns` are keys, printed as they are."""
    width = max(len(name) for name in rows) + 2
    widths = {name: max(len(name), 9) + 2 for name in columns}
    print(" " * width + "".join(f"{name:>{widths[name]}}" for name in columns))
    for name, row in rows.items():
        cells = [
            f"{_number(row[key]) if key in row else '-':>{widths[key]}}" for key in columns
        ]  # fmt: skip
        print(f"{name:<{width}}" + "".join(cells), flush=True)


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def finish(bench: str, figures: Mapping[str, Any], path: Path | None) -> None:
    line = json.dumps({"bench": bench, **figures})
    print(line, flush=True)
    if path is not None:
        path.write_text(line + "\n")


def lag_figures(lag: LagStats) -> dict[str, float]:
    """Milliseconds, and the seconds a loop was late altogether."""
    late = sum(
        count * FINEST_S * GROWTH**bucket
        for bucket, count in lag.buckets.items()
        if FINEST_S * GROWTH**bucket > LATE_S
    )
    return {
        "p50 ms": lag.med * 1000,
        "p99 ms": lag.p99 * 1000,
        "max ms": lag.max * 1000,
        "blocked s": late,
    }
