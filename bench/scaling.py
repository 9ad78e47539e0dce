"""What a rollout costs as rollouts, turns, tokens and bytes grow: straight lines, or not.

    python bench/scaling.py [--full] [--rounds 24] [--json FILE]

From reply bytes to columns in a segment file, by rollway's own parts: cutter, dialect, trace, blob,
writer. Each line doubles one size. Replies carry new positions only (delta), or all of them (full). The
figure is CPU milliseconds a rollout, the least of many short rounds, and by how much it grows when the
size doubles: 2 for what is proportional to it, 1 for what does not depend on it. Then whole steps (see
bench/step.py) with more and more bytes a token: what the orchestrator notices of them.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from loopback.control import tick
from loopback.engine import reply, serve
from loopback.processes import started
from loopback.report import QUIET, arguments, finish, table
from step import Workload
from step import measure as step

from rollway.inference.engines.vllm import Vllm
from rollway.inference.http.client import READ_BYTES
from rollway.inference.replies.body import BodyBuffer, BodyCutter
from rollway.inference.replies.routes import WantedRoutes
from rollway.loop.watch.run import run
from rollway.payload.blob import build, row_columns
from rollway.payload.writer import SegmentWriter
from rollway.records.payload import SegmentName
from rollway.records.turn import Turn
from rollway.trace.trace import Trace

BASE = {"rollouts": 2, "turns": 20, "tokens": 18_000, "bytes": 384}
SERIES: dict[str, tuple[int, ...]] = {
    "rollouts": (2, 4, 8),
    "turns": (5, 10, 20, 40),
    "tokens": (4500, 9000, 18_000, 36_000),
    "bytes": (96, 192, 384, 768),
}
STEP = {"rollouts": 64, "turns": 10, "tokens": 9000}


class Sized:
    """Replies of one rollout: `turns` of them, growing to `tokens`."""

    def __init__(self, turns: int, tokens: int, bytes: int, full: bool) -> None:
        self._full = full
        self._layers = bytes // 8
        self._ends = [tokens * n // turns for n in range(1, turns + 1)]
        self._drawn = tokens // turns // 2
        self._ids = np.full(tokens, 7, np.int32)  # the loopback engine draws sevens only
        self.turns = list(self._turns())

    def _turns(self) -> Iterator[tuple[np.ndarray, int, bytes]]:
        """Prompt, where routes are asked from, and the reply's body."""
        known = 0
        for end in self._ends:
            prompt = self._ids[: end - self._drawn]
            start = max(0, known - 1)
            positions = end - 1 - (0 if self._full else start)
            body = reply(positions, self._layers, 8, self._drawn)
            yield prompt, start, body[body.index(b"\r\n\r\n") + 4 :]
            known = end


def take_in(
    dialect: Vllm, body_buffer: BodyBuffer, prompt: np.ndarray, start: int, body: bytes
) -> Turn:
    """A reply in the pieces a socket gives."""
    wanted = WantedRoutes(start, len(prompt), max_tokens=len(prompt) - start)
    body_buffer.clear()
    cutter = BodyCutter(
        body_buffer, lambda key, bulk: dialect.unneeded_chars(key, bulk, wanted)
    )
    for at in range(0, len(body), READ_BYTES):
        cutter.feed(body, at, min(at + READ_BYTES, len(body)))
    drawn = dialect.parse_columns(cutter.rest)
    routes = dialect.decode_routes(cutter.bulks, wanted, len(drawn.token_ids))
    versions = np.zeros(len(drawn.token_ids), np.int32)
    return Turn(prompt, drawn.token_ids, drawn.logprobs, versions, 1.0, "stop", routes, start)


async def rollouts(count: int, sized: Sized, folder: Path) -> float:
    """CPU seconds of `count` rollouts."""
    dialect, body_buffer = Vllm(), BodyBuffer()
    start_s = time.process_time()
    with SegmentWriter(
        folder, SegmentName(f"bench{time.monotonic_ns()}", 0), 1 << 28
    ) as writer:
        for _ in range(count):
            trace = Trace()
            for prompt, start, body in sized.turns:
                trace.add(take_in(dialect, body_buffer, prompt, start, body))
            rows = trace.finish()
            await writer.append(build(row_columns(row.columns() for row in rows)))
    return time.process_time() - start_s


async def costs_ms(sizes: list[dict[str, int]], full: bool, rounds: int) -> list[float]:
    """Of a rollout at each size, one after the other in every round; the least of the rounds counts:
    what disturbs only ever adds."""
    made = []
    for size in sizes:
        rest = {name: value for name, value in size.items() if name != "rollouts"}
        made.append((size["rollouts"], Sized(**rest, full=full)))
    seconds: list[list[float]] = [[] for _ in sizes]
    for _ in range(rounds):
        for taken, (count, sized) in zip(seconds, made, strict=True):
            with TemporaryDirectory() as folder:
                taken.append(await rollouts(count, sized, Path(folder)) / count)
    return [min(taken) * 1000 for taken in seconds]


async def measure(rounds: int) -> dict[str, dict[str, object]]:
    figures = {}
    for full in (False, True):
        kind = "full" if full else "delta"
        for name, values in SERIES.items():
            costs = await costs_ms([{**BASE, name: value} for value in values], full, rounds)
            doubled = [b / a for a, b in pairwise(costs)]
            figures[f"{kind} {name}"] = {
                "sizes": values, "ms": costs, "per doubling": doubled,
            }  # fmt: skip
            cells = "  ".join(f"{v:,}: {ms:.2f}" for v, ms in zip(values, costs, strict=True))
            print(
                f"{kind:5} {name:9} {cells:60} × {statistics.median(doubled):.2f} per doubling, "
                f"at most {max(doubled):.2f}",
                flush=True,
            )
    return figures


def orchestrator(factors: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Lag and memory of the real orchestrator in a step, by bytes of routes a token."""
    figures = {}
    with started(tick) as control:
        for bytes in factors:
            work = Workload(Namespace(**STEP, bytes=bytes))
            with started(serve, work.engine) as engine:
                url = f"http://127.0.0.1:{engine.pipe.recv()}"
                figure = step("rollway", work, url, control)
            processes = figure["processes"]
            figures[f"{bytes} B a token"] = {
                **processes["orchestrator"],
                "control p99": processes["control"]["p99 ms"],
                "control max": processes["control"]["max ms"],
            }
    return figures


def main() -> None:
    args = arguments(__doc__, rounds=(24, "rounds of each point"))
    if args.full:
        args.rounds = max(args.rounds, 80)
        for name in ("tokens", "turns"):
            SERIES[name] = (*SERIES[name], 2 * SERIES[name][-1])
    base = ", ".join(f"{value:,} {name}" for name, value in BASE.items())
    print(f"CPU ms a rollout; where not varied: {base} of routes a token")
    figures: dict[str, object] = {**run("bench", QUIET, lambda watch: measure(args.rounds))}
    print(
        "\nthe orchestrator in a step of "
        + ", ".join(f"{n:,} {name}" for name, n in STEP.items())
    )
    rows = orchestrator((192, 384, 768, 1536) if args.full else (384, 768))
    table(rows, ("p99 ms", "max ms", "blocked s", "grew MB", "control p99", "control max"))
    finish("scaling", {**figures, "orchestrator": rows}, args.json)


if __name__ == "__main__":
    main()
