"""Prints the rewards of runs side by side, as a table in Markdown: each cell is the mean of some steps.

python tools/curves.py outputs/reverse-text outputs/reverse-text-dense [--every 15]
"""

import argparse
import json
from pathlib import Path
from statistics import fmean


def rewards(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    if not path.exists():
        raise SystemExit(f"{run} is not a run that has trained a step: it has no {path.name}")
    lines = path.read_text().splitlines()
    return [json.loads(line)["reward/all/mean"] for line in lines]


def means_of(values: list[float], every: int) -> list[float]:
    return [fmean(values[start : start + every]) for start in range(0, len(values), every)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--every", type=int, default=15, metavar="STEPS")
    args = parser.parse_args()
    means = {run.name: means_of(rewards(run), args.every) for run in args.runs}
    count = max(len(values) for values in means.values())
    steps = [
        f"{args.every * number + 1}–{args.every * (number + 1)}" for number in range(count)
    ]
    print(f"| steps | {' | '.join(steps)} |")
    print("|---" * (count + 1) + "|")
    for name, values in means.items():
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |")


if __name__ == "__main__":
    main()
