"""What a worker process costs before it does anything, with and without the HTTP client of `renderers`.

Both are started in turn, each in a fresh interpreter. The client loads the package `openai`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

WORKER = "import rollway.envserver.worker.worker"
VARIANTS = {"with the client": f"import renderers.client; {WORKER}", "rollway": WORKER}


def start(code: str) -> tuple[float, float]:
    """Run a program. Return its CPU seconds and its memory in MB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {report}"], capture_output=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, int(done.stdout) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="twenty rounds instead of five")
    rounds = 20 if parser.parse_args().full else 5
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    started_s = time.monotonic()
    for _ in range(rounds):
        for name, code in VARIANTS.items():
            found[name].append(start(code))
    cpu_s = {name: statistics.median(cpu for cpu, _ in runs) for name, runs in found.items()}
    rss_mb = {name: statistics.median(rss for _, rss in runs) for name, runs in found.items()}
    for name in VARIANTS:
        print(f"{name:16} {cpu_s[name]:5.2f} s of CPU, {rss_mb[name]:4.0f} MB")
    base, ours = VARIANTS
    ratio = cpu_s[ours] / cpu_s[base]
    print(f"rollway takes {ratio:.2f} of the CPU time ({time.monotonic() - started_s:.0f} s)")
    print(
        json.dumps({"bench": "imports", "cpu_ratio": ratio, "cpu_s": cpu_s, "rss_mb": rss_mb})
    )


if __name__ == "__main__":
    main()
