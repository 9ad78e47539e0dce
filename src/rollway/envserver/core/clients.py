"""The clients of one server: which are connected, which read news, which are away. Pure."""

from collections import OrderedDict

from ...records.rollout import Settled
from ...wire.messages import Tasks, Welcome
from .events import SendToClient
from .leases import Leases

LISTENING_S = 5.0
"""A client that was silent for longer is sent no news, which would pile up unread."""
MAX_AWAY = 1_000
"""How many clients are remembered after their lease ran out."""


class Clients:
    """The clients that said Hello. A client whose lease ran out may return without another Hello."""

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
        """Renew a client's lease. Return False for a stranger, which never said Hello."""
        if client not in self._here and client not in self._away:
            return False
        self.hello(client)
        return True

    def unreachable(self, client: bytes) -> bool:
        """Send a client no news until it is heard again. Return False if it is not here."""
        if client in self._here:
            self._unreachable.add(client)
        return client in self._here

    def away(self, client: bytes) -> None:
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
        return sorted(self._leases.silent(self._lease_s))

    def listening(self) -> list[bytes]:
        return sorted(set(self._leases.heard_within(LISTENING_S)) - self._unreachable)


class Undelivered:
    """Answers that wait until their client is heard again. News is not kept."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, list[SendToClient]] = {}

    def keep(self, unsent: SendToClient) -> None:
        if isinstance(unsent.message, Settled | Tasks | Welcome):
            self._by_client.setdefault(unsent.client, []).append(unsent)

    def take(self, client: bytes) -> list[SendToClient]:
        return self._by_client.pop(client, [])
