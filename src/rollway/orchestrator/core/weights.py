"""Which version is published, which one the engine samples from, and the update between them."""

from ...records.ids import PolicyVersion
from .commands import UpdateWeights
from .events import VersionPublished


class Weights:
    """One update at a time, always to the newest version."""

    def __init__(self, version: PolicyVersion) -> None:
        self.published = version
        self.applied = version
        self.updating: PolicyVersion | None = None
        self._newest: VersionPublished | None = None

    def wants(self, published: VersionPublished) -> list[UpdateWeights]:
        """The engine shall sample from this version, as soon as it can."""
        self._newest = published
        return self._update()

    def on_applied(self, version: PolicyVersion) -> list[UpdateWeights]:
        self.applied = version
        self.updating = None
        return self._update()

    def _update(self) -> list[UpdateWeights]:
        newest = self._newest
        if newest is None or self.updating is not None or newest.version <= self.applied:
            return []
        self.updating = newest.version
        return [UpdateWeights(newest.version, newest.path)]
