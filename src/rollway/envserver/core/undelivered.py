"""What could not be delivered to a client that has lost its connection for a moment. Pure."""

from ...records.rollout import Settled
from ...wire.messages import Tasks, Welcome
from .events import TellClient


class Kept:
    """Answers wait until their client is heard again; what is only news does not."""

    def __init__(self) -> None:
        self._kept: dict[bytes, list[TellClient]] = {}

    def keep(self, told: TellClient) -> None:
        if isinstance(told.message, Settled | Tasks | Welcome):
            self._kept.setdefault(told.client, []).append(told)

    def take(self, client: bytes) -> list[TellClient]:
        return self._kept.pop(client, [])
