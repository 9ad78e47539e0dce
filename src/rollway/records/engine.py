"""How busy the engines are."""

from msgspec import Struct

from .ids import PolicyVersion


class EngineLoad(Struct, frozen=True):
    """Requests being decoded, requests waiting to be, and the share of the cache that is in use."""

    running: int
    waiting: int
    cache_use: float


class Published(Struct, frozen=True):
    """Weights of `version` lie complete in `path`; `metrics` are those of the step that made them."""

    version: PolicyVersion
    path: str
    metrics: dict[str, float]
