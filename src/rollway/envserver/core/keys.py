"""What rollouts are called inside one server.

Clients choose ids by themselves: two of them may choose the same, and one may use an id again. Towards
workers a rollout is called by a key: its id and a number that no other rollout of this server has.
"""

from ...records.ids import RolloutId

_MARK = "#"


def key_of(id: RolloutId, serial: int) -> RolloutId:
    """`g12.3#57`: readable in logs, unique in the server."""
    return RolloutId(f"{id}{_MARK}{serial}")


def serial_of(key: RolloutId) -> int:
    return int(key.rpartition(_MARK)[2])
