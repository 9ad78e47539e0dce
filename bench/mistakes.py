"""How long rollway takes to say that something is wrong: every mistake of a newcomer, and Ctrl-C.

Times are from the start of the command to its end. Nothing else should run on the machine.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import build_tiny_moe
from tests.doubles.mistakes import MISTAKES, desk

COMMAND = [sys.executable, "-m", "rollway"]


def time_mistake(words: list[str], folder: Path) -> tuple[float, str]:
    """Return how long the command took, and the last line that it said."""
    start_s = time.monotonic()
    done = subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True)
    took_s = time.monotonic() - start_s
    assert done.returncode in (1, 2), done.stdout + done.stderr
    return took_s, done.stderr.strip().splitlines()[-1]


def time_ctrl_c(folder: Path, line: str) -> tuple[float, str]:
    """Return how long a run takes to end after Ctrl-C at this line, while it loads its models."""
    command = [*COMMAND, "train", "run.toml", "--clean"]
    with subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for said in process.stdout:
            if re.match(line, said):
                break
        time.sleep(1.0)  # models are being loaded
        start_s = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate()
        return time.monotonic() - start_s, errors.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="three rounds instead of one")
    num_rounds = 3 if parser.parse_args().full else 1
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), Path(name, "model")
        model.mkdir()
        build_tiny_moe(model)
        with desk(folder, model) as places:
            for mistake in MISTAKES:
                words = [word.format(**places) for word in mistake.words]
                times = [time_mistake(words, folder) for _ in range(num_rounds)]
                slowest[mistake.name] = max(took_s for took_s, _ in times)
                print(
                    f"{slowest[mistake.name]:5.2f} s  {mistake.name:32} {times[-1][1][:90]}"
                )
        stops = [time_ctrl_c(folder, "Starting:") for _ in range(num_rounds)]
        stop_s = max(took_s for took_s, _ in stops)
        print(f"{stop_s:5.2f} s  {'Ctrl-C while models load':32} {stops[-1][1][:90]}")
    worst = max(slowest, key=slowest.__getitem__)
    median_s = statistics.median(slowest.values())
    print(f"median {median_s:.2f} s, slowest {slowest[worst]:.2f} s ({worst})")
    figures = {"median_s": median_s, "slowest_s": slowest[worst], "ctrl_c_s": stop_s}
    print(json.dumps({"bench": "mistakes", **figures}))


if __name__ == "__main__":
    main()
