"""One engine of a run, as the fleet knows it."""

import asyncio
from time import monotonic

from ...inference.engines.control import EngineControl
from ...records.engine import EngineLoad
from ...records.ids import PolicyVersion, RolloutId
from .verifier import EngineVerifier


class FleetEngine:
    """The state of one engine: whether it answers, what it has loaded, and how it was judged."""

    def __init__(
        self, control: EngineControl, version: PolicyVersion, *, must_load: bool
    ) -> None:
        self.control = control
        self.url = control.url
        self.verifier = EngineVerifier(control)
        self.version = version
        """The version it was given last. If the engine reports none, this is what it has."""
        self.is_verified = False
        self.must_load = must_load
        """Load the wanted weights whatever version the engine reports."""
        self.must_tell = False
        """Ask again how it was started, before it is used."""
        self.reports_version = True
        self.updating = asyncio.Lock()
        self.heard_s = monotonic()
        self.trouble = ""
        """Why it does not answer; empty while it does."""
        self.refusal = ""
        """Why it is out of service: it failed to load `version`, or loaded other weights."""
        self.is_judged = True
        """False from the start of a load until the verdict about it."""
        self.suspects: frozenset[RolloutId] = frozenset()
        """The rollouts that were not settled when it was last taken out of service. If it drew one of
        them, that rollout may have tokens of wrong weights."""
        self.load: EngineLoad | None = None

    @property
    def is_in_service(self) -> bool:
        return self.is_verified and not (self.trouble or self.refusal or self.must_load)

    @property
    def silent_s(self) -> float:
        return monotonic() - self.heard_s if self.trouble else 0.0
