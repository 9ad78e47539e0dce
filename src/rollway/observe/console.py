"""The console of a run: one line per step and, on a terminal, a status line below them."""

import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from ..loop.watch.stall_text import ms, stall_text
from ..records.lag import LagStats, Stall
from ..records.situation import CoreView
from ..records.text import visible
from .report import EvalDone, StepDone

CLEAR = "\r\x1b[2K"


def step_line(done: StepDone, max_steps: int) -> str:
    """Return the line of a trained step, in the form that other RL frameworks use."""
    get = done.metrics.get
    parts = [
        f"Step {done.step}/{max_steps}",
        f"Time: {_seconds(get('time/step', 0))}",
        f"Reward: {get('reward/all/mean', 0):.4f}",
        f"Throughput: {get('throughput/tokens', 0):.1f} tokens/s",
        f"Seq. Length: {get('seq_len/mean', 0):.1f}",
        f"Off-Policy: {get('off_policy/mean', 0):.2f} (max {get('off_policy/max', 0):.0f})",
        f"In Flight: {get('in_flight', 0):.0f}",
        f"KL: {abs(get('mismatch_kl', 0)):.5f}",
        f"Lag p99/max ms: {lag_line(done.lags)}",
    ]
    failed = [
        f"{count:.0f} {name.removeprefix('errors/')}"
        for name, count in done.metrics.items()
        if name.startswith("errors/") and name != "errors/cancelled" and count
    ]
    if failed:
        parts.insert(6, f"Failed: {', '.join(failed)}")
    return " | ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value >= 0.1 else f"{value * 1000:.0f}ms"


def eval_line(done: EvalDone) -> str:
    """Return the line of an evaluation between steps, one environment after the other."""
    if not done.metrics:
        return (
            f"Eval of version {done.version} | no environment has tasks in its split 'eval'"
        )
    by_env: dict[str, dict[str, float]] = {}
    for name, value in done.metrics.items():
        _, env, metric = name.split("/", 2)
        by_env.setdefault(env, {})[metric] = value
    texts = [f"{env}: {_eval(metrics)}" for env, metrics in by_env.items()]
    return " | ".join([f"Eval of version {done.version}", *texts])


def _eval(metrics: Mapping[str, float]) -> str:
    scores = [f"{name} {value:.3f}" for name, value in metrics.items() if "@" in name]
    details = [f"{metrics['tasks']:.0f} tasks"]
    if metrics["failed"]:
        details.append(f"{metrics['failed']:.0%} failed")
    oldest, newest = metrics.get("version/min", 0), metrics.get("version/max", 0)
    if newest > oldest:
        details.append(f"versions {oldest:.0f} to {newest:.0f}")
    return f"{', '.join(scores) or 'nothing was scored'} ({', '.join(details)})"


def lag_line(lags: Mapping[str, LagStats]) -> str:
    return ", ".join(
        f"{name} {ms(lag.p99)}/{ms(lag.max)}" for name, lag in sorted(lags.items())
    )


def worst_lag(lags: Mapping[str, LagStats]) -> str:
    name, lag = max(lags.items(), key=lambda item: item[1].max, default=("-", LagStats()))
    return f"worst lag now: {name} {ms(lag.max)} ms"


def status_line(core: CoreView, max_steps: int, lags: Mapping[str, LagStats]) -> str:
    """Describe where the run is, for the last line of a terminal."""
    full = " (at its budget: starting nothing)" if core.is_held_back else ""
    return (
        f"step {min(core.step, max_steps)}/{max_steps} · {core.ready}/{core.batch_size} rollouts ready "
        f"· {core.in_flight} in flight · {core.live_bytes / 1e6:.1f} MB payload{full} · engine at "
        f"version {core.version} · {worst_lag(lags)}"
    )


def stall_line(process: str, stall: Stall) -> str:
    return f"{process}: {stall_text(stall)}"


class Screen:
    """Prints lines and, if the output is a terminal, keeps a status line below them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._status = ""

    def line(self, text: str) -> None:
        text = visible(text)
        self._write(f"{CLEAR}{text}\n{self._status}" if self._is_terminal else f"{text}\n")

    def status(self, text: str) -> None:
        """Replace the status line. Without a terminal, nothing is shown."""
        if self._is_terminal:
            # CLEAR removes one line, so the status must not wrap.
            self._status = visible(text)[: shutil.get_terminal_size().columns - 1]
            self._write(CLEAR + self._status)

    def close(self) -> None:
        if self._status:
            self._write(CLEAR)
        self._status = ""

    def _write(self, text: str) -> None:
        # a full disk behind a redirection, a pipe whose reader is gone: the run goes on unseen
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
