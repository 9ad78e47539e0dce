"""How long each phase of a step took, as the shell sees it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...records.ids import Step
from ..core.core import Core


class Phases:
    """From one ship to the next: the batch fills, is held for the trainer, is written."""

    def __init__(self) -> None:
        self._shipped_s = time.monotonic()
        self._full_s: float | None = None
        self._credit_s = 0.0
        self._num_crediting = 0
        self._crediting_since_s = 0.0
        self._update_s: float | None = None
        self._of_step: dict[Step, dict[str, float]] = {}

    def look(self, core: Core) -> None:
        """After every event: note when a batch is complete that cannot be shipped yet."""
        if self._full_s is None and core.is_full:
            self._full_s = time.monotonic()

    @contextmanager
    def crediting(self) -> Iterator[None]:
        """While any group waits for its advantages; several at a time count once."""
        if not self._num_crediting:
            self._crediting_since_s = time.monotonic()
        self._num_crediting += 1
        yield
        self._num_crediting -= 1
        if not self._num_crediting:
            self._credit_s += time.monotonic() - self._crediting_since_s

    @contextmanager
    def shipping(self, step: Step) -> Iterator[None]:
        """From the decision to ship until the manifest is written."""
        decided_s = time.monotonic()
        full_s, self._full_s = self._full_s or decided_s, None
        begun_s, self._shipped_s = self._shipped_s, decided_s
        if self._num_crediting:
            self._credit_s += decided_s - self._crediting_since_s
            self._crediting_since_s = decided_s
        credit_s, self._credit_s = self._credit_s, 0.0
        yield
        self._of_step[step] = {
            "time/wait_rollouts": full_s - begun_s,
            "time/hold": decided_s - full_s,
            "time/credit": credit_s,
            "time/ship": time.monotonic() - decided_s,
        }

    @contextmanager
    def updating(self) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self._update_s = time.monotonic() - start_s

    def take(self, step: Step) -> dict[str, float]:
        """The phases of a step that is trained, and the last weight update that ended before."""
        update_s, self._update_s = self._update_s, None
        update = {} if update_s is None else {"time/update_weights": update_s}
        return {**self._of_step.pop(step, {}), **update}
