"""One engine of a run, as the fleet knows it."""

import asyncio
from time import monotonic

from msgspec import Struct

from ...errors import EngineError
from ...inference.engines.control import EngineControl
from ...inference.engines.facts import problems
from ...inference.engines.verdict import CEILINGS, COARSEST
from ...records.engine import EngineLoad
from ...records.ids import PolicyVersion, RolloutId
from .verifier import EngineVerifier


class EngineNeeds(Struct, frozen=True):
    """What a run needs of its engines."""

    routes: bool
    temperature: float
    unknown_dtype: str
    """The number format of engines that do not tell it."""


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

    async def read_settings(self, needs: EngineNeeds) -> str:
        """Note how the engine was started. Return why it cannot be trained on, or ""."""
        told = await self.control.read_facts()
        dtype = told.dtype if told else needs.unknown_dtype
        self.verifier.dtype = dtype if dtype in CEILINGS else COARSEST
        self.must_tell = False
        found = problems(
            self.control.served,
            told,
            wants_routes=needs.routes,
            temperature=needs.temperature,
        )
        return next(found, "")

    async def confirm(self, version: PolicyVersion) -> None:
        """Tell the engine which version it has. Raise EngineError if it then reports another one."""
        await self.control.confirm(version)
        reported = await self.control.weight_version()
        if reported and reported != str(version):
            raise EngineError(
                f"it was told that it has version {version} and reports '{reported}': something else "
                "gives it weights, too"
            )
