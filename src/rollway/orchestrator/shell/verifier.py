"""Asks an engine for the logprobs of a version's probe, and says whether it has the right weights."""

import math
from pathlib import Path
from time import monotonic

import msgspec
from msgspec import Struct

from ...errors import UNREADABLE, EngineError
from ...inference.engines.control import EngineControl
from ...inference.engines.verdict import (
    CEILINGS,
    Comparison,
    Tolerance,
    compare,
    why_refused,
)
from ...loop.lanes.threads import thread
from ...records.ids import PolicyVersion
from ...records.probe import Probe


class Verdict(Struct, frozen=True):
    """`refusal` is empty if the engine has the right weights."""

    comparison: Comparison
    refusal: str
    seconds: float


class EngineVerifier:
    """Verifies one engine. Its first verdict shows how much of a difference is rounding."""

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self.dtype = "float32"
        """The engine's number format."""
        self._tolerance: Tolerance | None = None

    async def verify(self, version: PolicyVersion, probe: Probe) -> Verdict:
        """Compare the engine with a probe. An engine that does not give logprobs is refused."""
        start_s, control = monotonic(), self._control
        answers = await control.probe([text.token_ids for text in probe.texts])
        tolerance = self._tolerance or Tolerance(
            max(probe.dtype, self.dtype, key=CEILINGS.__getitem__)
        )
        try:
            comparison = compare(probe, answers, tolerance)
        except ValueError as error:
            raise EngineError(
                f"the engine at {control.url} does not answer a probe: {error}"
            ) from None
        window = control.served.max_model_len
        if probe.cached is not None and len(probe.cached.token_ids) < (window or math.inf):
            (cached,) = await control.probe([probe.cached.token_ids], reads_cache=True)
            off = abs(cached.top_logprob - probe.cached.top_logprob)
            comparison = msgspec.structs.replace(comparison, cache_error=off)
        refusal = why_refused(comparison, version, tolerance)
        if self._tolerance is None and not refusal:
            self._tolerance = msgspec.structs.replace(tolerance, first_mean=comparison.mean)
        return Verdict(comparison, refusal, monotonic() - start_s)


async def read_probe(path: Path) -> Probe | None:
    """Read a probe. None means that the trainer writes none."""
    try:
        return msgspec.msgpack.decode(await thread(path.read_bytes), type=Probe)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise EngineError(f"the probe {path} is damaged: {error}") from None
