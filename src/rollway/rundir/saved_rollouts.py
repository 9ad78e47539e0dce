"""Saved rollouts: the lines of `rollouts/step_N/{train,eval}.jsonl`, read back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import UNREADABLE
from ..records.task import Message
from .rundir import RunDir


class SavedRollout(Struct, frozen=True):
    """One line. What a failed or cancelled rollout does not have is empty."""

    rollout: str
    group: int
    env: str
    task: str
    fate: str
    outcome: str
    step: int = 0
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    advantage: float | None = None
    num_turns: int = 0
    num_tokens: int = 0
    stop: str = ""
    first_version: int | None = None
    last_version: int | None = None
    timing: dict[str, float] = {}
    messages: tuple[Message, ...] = ()
    boundary: str = ""
    error: str = ""
    traceback: str = ""
    reason: str = ""


def saved_rollouts(run: RunDir, step: int | None = None) -> Iterator[SavedRollout]:
    """Those of one step, or of all, in the order they were written. Torn lines are passed over."""
    for number, path in _files(run):
        if step is not None and number != step:
            continue
        for line in path.read_bytes().splitlines():
            try:
                found = msgspec.json.decode(line, type=dict[str, Any])
                yield msgspec.convert({**found, "step": number}, SavedRollout)
            except UNREADABLE:
                continue


def saved_steps(run: RunDir) -> list[int]:
    return sorted({number for number, _ in _files(run)})


def _files(run: RunDir) -> list[tuple[int, Path]]:
    found = [(one.parent.name.removeprefix("step_"), one) for one in run.rollouts.glob("step_*/*.jsonl")]
    return sorted((int(number), path) for number, path in found if number.isdigit())
