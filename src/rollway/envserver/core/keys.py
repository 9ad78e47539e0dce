"""What rollouts are called inside one server.

Clients choose ids by themselves: two of them may choose the same, and one may use an id again. Towards
workers a rollout is called by a key: its id and a number that no other rollout of this server has.
"""

import re

from ...records.ids import RolloutId

_MARK = "#"
_NUMBER = re.compile(r"\d+")


def key_of(id: RolloutId, serial: int) -> RolloutId:
    """`g12.3#57`: readable in logs, unique in the server."""
    return RolloutId(f"{id}{_MARK}{serial}")


def serial_of(key: RolloutId) -> int:
    return int(key.rpartition(_MARK)[2])


def group_number(key: RolloutId) -> int:
    """The first number in an id, 12 in `g12.3`: rollouts of a group have the same, those of the next
    group the next; 0 where a client calls them otherwise."""
    found = _NUMBER.search(key.rpartition(_MARK)[0] or key)
    return int(found[0]) if found else 0
