"""A probe: short texts with the logprobs that one version of the weights gives them.

The trainer writes a probe beside each version. After an engine has loaded the version, it is asked for
the logprobs of the same texts. If they differ, the engine samples from other weights than the trainer's.
"""

from msgspec import Struct

from .ids import PolicyVersion

PROBE_FILE = "probe.msgpack"


class ProbeText(Struct, frozen=True):
    """A few tokens, and the logprobs of all of them but the first, at temperature 1."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    before: tuple[float, ...] = ()
    """The logprobs under the version before. Empty if there is none."""
    routes: bytes = b""
    """The experts `[tokens, layers, topk]` as uint16, in the layers that have experts."""


class CachedText(Struct, frozen=True):
    """A text that is long enough to be kept in an engine's prefix cache, and the logprob of the token
    that is most likely to follow it."""

    token_ids: tuple[int, ...]
    top_logprob: float


class Probe(Struct, frozen=True):
    version: PolicyVersion
    dtype: str
    """The coarser number format of the trainer and of the published weights."""
    texts: tuple[ProbeText, ...]
    cached: CachedText | None = None
    moe_layers: tuple[int, ...] = ()
    """The layers that `routes` cover."""
    topk: int = 0
