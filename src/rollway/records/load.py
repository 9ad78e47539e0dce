"""How busy the engines are."""

from msgspec import Struct


class EngineLoad(Struct, frozen=True):
    """Requests being decoded, requests waiting to be, and the share of the cache that is in use."""

    running: int
    waiting: int
    cache_use: float
