"""The clients of one server: who is welcome, who listens, who is gone. Pure."""

from collections import OrderedDict

from ...records.rollout import Settled
from ...wire.messages import Tasks, Welcome
from .events import TellClient
from .leases import Leases

LISTENING_S = 5.0
"""A client not heard of for longer is not told what is only news: it would pile up unread."""
MAX_AWAY = 1_000


class Clients:
    """Those that said Hello. One that was taken for gone and speaks again is there again, without
    another Hello; the last thousand of those are remembered."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: Leases[bytes] = Leases()
        self._here: set[bytes] = set()
        self._unreachable: set[bytes] = set()
        self._away: OrderedDict[bytes, None] = OrderedDict()

    def hello(self, client: bytes) -> None:
        self._away.pop(client, None)
        self._unreachable.discard(client)
        self._here.add(client)
        self._leases.renew(client)

    def heard(self, client: bytes) -> bool:
        """Whether this is one of ours; renews its lease."""
        if client not in self._here and client not in self._away:
            return False
        self.hello(client)
        return True

    def unreachable(self, client: bytes) -> bool:
        """It has no connection, and is told no news until it is heard again. Whether it is ours."""
        if client in self._here:
            self._unreachable.add(client)
        return client in self._here

    def away(self, client: bytes) -> None:
        """It has been silent for too long."""
        if client not in self._here:
            return
        self._here.discard(client)
        self._unreachable.discard(client)
        self._leases.end(client)
        self._away[client] = None
        if len(self._away) > MAX_AWAY:
            self._away.popitem(last=False)

    def tick(self, now_s: float) -> None:
        self._leases.tick(now_s)

    def silent(self) -> list[bytes]:
        """Those whose lease has run out."""
        return sorted(self._leases.silent(self._lease_s))

    def listening(self) -> list[bytes]:
        """Those that would read news now."""
        return sorted(set(self._leases.heard_within(LISTENING_S)) - self._unreachable)


class Undelivered:
    """Answers wait until their client is heard again; what is only news does not."""

    def __init__(self) -> None:
        self._kept: dict[bytes, list[TellClient]] = {}

    def keep(self, told: TellClient) -> None:
        if isinstance(told.message, Settled | Tasks | Welcome):
            self._kept.setdefault(told.client, []).append(told)

    def take(self, client: bytes) -> list[TellClient]:
        return self._kept.pop(client, [])
