"""Turns into rows: rollway's merge against a naive one that rebuilds whole arrays at every turn.

    python bench/trace.py [--turns 20] [--tokens 18000] [--bytes 384] [--rounds 5] [--json FILE]

Both get the same replies with full routes, as an engine without prefix omission sends them. Baseline
and candidate alternate in one run; the ratio is per round.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from rollway.records.turn import Turn
from rollway.trace.trace import Trace


def replies(num_turns: int, num_tokens: int, bytes_per_token: int) -> list[Turn]:
    """A conversation that grows to `num_tokens` in equal turns, half prompt and half completion."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, num_tokens).astype(np.int32)
    routes = rng.integers(0, 128, (num_tokens, bytes_per_token // 8, 8), np.uint8)
    turns = []
    for number in range(1, num_turns + 1):
        end = num_tokens * number // num_turns
        start = end - num_tokens // num_turns // 2
        turns.append(
            Turn(
                prompt_ids=ids[:start],
                completion_ids=ids[start:end],
                logprobs=np.zeros(end - start, np.float32),
                versions=np.zeros(end - start, np.int32),
                temperature=1.0,
                finish_reason="stop",
                routes=routes[: end - 1],
            )
        )
    return turns


def naive(turns: list[Turn]) -> Any:
    """Lists compared item by item, arrays concatenated anew at every turn."""
    ids: list[int] = []
    routes: Any = None
    for turn in turns:
        prompt = turn.prompt_ids.tolist()
        assert prompt[: len(ids)] == ids
        known = max(0, len(ids) - 1)
        ids = prompt + turn.completion_ids.tolist()
        assert turn.routes is not None
        old = turn.routes[:0] if routes is None else routes[:known]
        last = np.zeros((1, *turn.routes.shape[1:]), np.uint8)
        routes = np.concatenate([old, turn.routes[known:], last])
    return routes


def rollway(turns: list[Turn]) -> Any:
    trace = Trace()
    for turn in turns:
        trace.add(turn)
    (row,) = trace.finish()
    return row


def timed(work: Any, turns: list[Turn]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work(turns)
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=18_000)
    parser.add_argument("--bytes", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    turns = replies(args.turns, args.tokens, args.bytes)
    ratios, figures = [], {}
    for _ in range(args.rounds):
        naive_s, routes = timed(naive, turns)
        rollway_s, row = timed(rollway, turns)
        assert np.concatenate(row.routes).tobytes() == routes.tobytes()
        ratios.append(naive_s / rollway_s)
        figures = {"naive_ms": naive_s * 1000, "rollway_ms": rollway_s * 1000}
    figures["ratio"] = statistics.median(ratios)
    print(
        f"{args.turns} turns to {args.tokens} tokens × {args.bytes} B: "
        f"naive {figures['naive_ms']:.1f} ms, rollway {figures['rollway_ms']:.2f} ms, "
        f"ratio {figures['ratio']:.1f} "
        f"({min(ratios):.1f} to {max(ratios):.1f} over {args.rounds} rounds)"
    )
    line = json.dumps({"bench": "trace", **figures})
    print(line)
    if args.json:
        args.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
