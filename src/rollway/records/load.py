"""How busy an engine is, in its own words."""

from msgspec import Struct


class EngineLoad(Struct, frozen=True):
    """Requests it runs, requests that wait for a place, and the used part of its cache, 0 to 1."""

    running: int
    waiting: int
    cache_use: float
