"""A policy: one version of the weights."""

from msgspec import Struct

from .ids import PolicyVersion


class Published(Struct, frozen=True):
    """Weights of `version` lie complete in `path`; `metrics` are those of the step that made them."""

    version: PolicyVersion
    path: str
    metrics: dict[str, float]
