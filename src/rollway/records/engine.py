"""How busy an engine is, and the weights that the trainer published for it."""

from urllib.parse import urlsplit

from msgspec import Struct

from .ids import PolicyVersion


class EngineLoad(Struct, frozen=True):
    """The requests that are decoded, the requests that wait, and the share of the cache in use."""

    running: int
    waiting: int
    cache_use: float


class Published(Struct, frozen=True):
    """The weights of `version` are complete in `path`; `metrics` are those of the step behind them."""

    version: PolicyVersion
    path: str
    metrics: dict[str, float]
    saved: PolicyVersion | None = None
    """The newest version that the trainer can restart from. It trains the batches after that again, so
    their payload is kept. None, from a trainer of your own: the payload of this batch may be removed."""


def fresh_kl_key(url: str) -> str:
    """Return the name of the metric that compares one engine with the trainer."""
    return f"fresh_kl/{urlsplit(url).netloc}"
