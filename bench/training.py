"""What a training step costs as more rows of 512 tokens are packed into it: time, and peak memory.

    python bench/training.py [--full] [--rounds 3] [--old FOLDER] [--json FILE]

Each figure comes from a process of its own that loads a tiny Mixture-of-Experts, trains one step to warm
up and two to measure, with router replay, in the environment that a trainer's process has. Memory is the
growth of the process's peak above what it had with the model loaded. Sizes take turns, round after
round. The fastest step counts, as other programs can only slow one down, and the median of the memory.
`--old` is a checkout of another version of this repository, which is measured at the smallest size
beside this one.
"""

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loopback.report import arguments, finish, table

ROOT = Path(__file__).parents[1]
SIZES = (8_192, 16_384, 32_768)
FULL_SIZES = (*SIZES, 65_536)
ROW_TOKENS = 512
NUM_EXPERTS, TOPK, NUM_LAYERS = 8, 2, 2
MEASURE = "--measure"


def measure(num_tokens: int) -> dict[str, float]:
    """Train in this process, and return what a step costs after the first."""
    import torch

    from rollway.config.sections import TrainerConfig
    from rollway.model.load import load_model, save_weights
    from rollway.model.tiny import TinyShape, tiny_model
    from rollway.payload.reader import SegmentReader
    from rollway.records.batch import BatchManifest
    from rollway.records.ids import PolicyVersion, Step
    from rollway.trainer.step import Learner

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with TemporaryDirectory(prefix="rollway-bench-") as name:
        folder = Path(name)
        save_weights(tiny_model(TinyShape(), 300, 1, 1024), folder / "model")
        model = opened(load_model(str(folder / "model")))
        rows = asyncio.run(write_rows(folder, num_tokens // ROW_TOKENS))
        planned = (tuple(range(len(rows))),)
        manifest = BatchManifest(Step(1), PolicyVersion(0), tuple(rows), (planned,))
        learner = Learner(model, TrainerConfig(micro_batch_tokens=num_tokens))
        before, times = peak_mb(), []
        for _ in range(3):
            start = time.perf_counter()
            learner.step(manifest, SegmentReader(folder))
            times.append(time.perf_counter() - start)
    return {"MB": peak_mb() - before, "s": min(times[1:])}


def opened(model: Any) -> Any:
    """Return what this version's Learner takes."""
    try:
        from rollway.model.proof import open_rows
    except ImportError:
        return model
    return open_rows(model)


async def write_rows(folder: Path, count: int) -> list[Any]:
    import numpy as np

    from rollway.payload.blob import build, row_columns
    from rollway.payload.writer import SegmentWriter
    from rollway.records.batch import BatchRow
    from rollway.records.ids import RolloutId
    from rollway.records.payload import SegmentName
    from rollway.records.turn import Turn
    from rollway.trace.trace import Trace

    rng, rows, half = np.random.default_rng(0), [], ROW_TOKENS // 2
    pairs = np.array([(a, b) for a in range(NUM_EXPERTS) for b in range(a)], np.uint8)
    with SegmentWriter(folder, SegmentName("w", 0), 1 << 30) as writer:
        for index in range(count):
            turn = Turn(
                prompt_ids=rng.integers(3, 300, half).astype(np.int32),
                completion_ids=rng.integers(3, 300, half).astype(np.int32),
                logprobs=np.full(half, -5.7, np.float32),
                versions=np.zeros(half, np.int32),
                temperature=1.0,
                finish_reason="length",
                routes=pairs[rng.integers(len(pairs), size=(ROW_TOKENS - 1, NUM_LAYERS))],
            )
            trace = Trace()
            trace.add(turn)
            (row,) = trace.finish()
            ref = await writer.append(build(row_columns([row.columns()])))
            sizes = row.num_tokens, row.num_trainable
            rows.append(BatchRow(RolloutId(f"g0.{index}"), ref, 0, *sizes, index % 2 - 0.5))
    return rows


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_process(tree: Path, num_tokens: int) -> dict[str, float]:
    command = [sys.executable, __file__, MEASURE, str(num_tokens)]
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    if tree == ROOT:
        from rollway.loop.processes.child import COMPUTE_ENV

        env |= COMPUTE_ENV
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    args = arguments(
        __doc__, rounds=(3, "rounds of all sizes"), old=("", "a checkout of another version")
    )
    cases = [("", ROOT, size) for size in (FULL_SIZES if args.full else SIZES)]
    if args.old:
        cases.append(("old ", Path(args.old).resolve(), SIZES[0]))
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for label, tree, size in cases:
            runs.setdefault(f"{label}{size:,} tokens", []).append(in_process(tree, size))
    figures = {
        name: {
            "MB": statistics.median(run["MB"] for run in found),
            "s": min(run["s"] for run in found),
        }
        for name, found in runs.items()
    }
    names = [name for name in figures if not name.startswith("old")]
    for smaller, larger in pairwise(names):
        for key in ("MB", "s"):
            figures[larger][f"{key} per doubling"] = (
                figures[larger][key] / figures[smaller][key]
            )
    table(figures, ("MB", "MB per doubling", "s", "s per doubling"))
    finish("training", figures, args.json)


if __name__ == "__main__":
    if MEASURE in sys.argv:
        print(json.dumps(measure(int(sys.argv[-1]))))
    else:
        main()
