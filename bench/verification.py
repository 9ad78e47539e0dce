"""What it costs to verify every load of weights: the demo with and without it, taking turns.

    python bench/verification.py [--full] [--rounds 2] [--steps 30] [--vllm PROGRAM] [--json FILE]

Prints the time that an engine takes to answer a probe, its share of the time between two versions, and
how long a step takes in both cases. `--vllm` names vLLM's program, such as
.venv-vllm/bin/vllm; by default the embedded engine is measured.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from loopback.report import arguments, finish, table

ROOT = Path(__file__).parents[1]
RUN_FILE = ROOT / "examples" / "reverse-text" / "run.toml"
FIRST_STEPS = 3
"""Steps at the start of a run that do not count: workers and engine warm up."""


def train(folder: Path, name: str, steps: int, *settings: str) -> list[dict[str, float]]:
    """Train in `folder`, and return the metrics of each step."""
    values = [f"name={name}", f"output_dir={folder}", f"max_steps={steps}", *settings,
              f"model.path={folder}/model"]  # fmt: skip
    options = [word for value in values for word in ("--set", value)]
    command = [sys.executable, "-m", "rollway", "train", str(RUN_FILE), "--clean", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    args = arguments(
        __doc__,
        rounds=(2, "runs of each kind"),
        steps=(30, "steps of a run"),
        vllm=("", "the program of vLLM"),
    )
    steps = args.steps * (5 if args.full else 1)
    more = [f"engine.vllm.command={args.vllm}"] if args.vllm else []
    verify_s: list[float] = []
    step_s: dict[bool, list[float]] = {True: [], False: []}
    with TemporaryDirectory(prefix="rollway-bench-") as name:
        folder = Path(name)
        for number in range(args.rounds):
            for verifies in (True, False):
                setting = f"engine.verify={json.dumps(verifies)}"
                lines = train(folder, f"run-{number}-{verifies}", steps, setting, *more)
                for line in lines[FIRST_STEPS:]:
                    step_s[verifies].append(line["time/step"])
                    if "time/verify" in line:
                        verify_s.append(line["time/verify"])
    figures = {
        "verified": {
            "ms a version": 1e3 * statistics.median(verify_s),
            "ms at most": 1e3 * max(verify_s),
            "% of a step": 100 * sum(verify_s) / sum(step_s[True]),
            "s a step": statistics.median(step_s[True]),
        },
        "not verified": {"s a step": statistics.median(step_s[False])},
    }
    table(figures, ("ms a version", "ms at most", "% of a step", "s a step"))
    finish("verification", figures, args.json)


if __name__ == "__main__":
    main()
