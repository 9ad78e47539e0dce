"""Rollouts the server owes an answer for. Pure."""

import re

import msgspec
from msgspec import Struct

from ...records.ids import RolloutId, WorkerName
from ...records.rollout import Outcome, Settled
from ...wire.messages import Run

NO_WORKER = WorkerName("")


class OpenRun(Struct):
    """One rollout: whose it is, under which id, and what has become of it so far."""

    client: bytes
    id: RolloutId
    """As its client calls it."""
    run: Run
    """As workers are told it: with the key for an id, and the current attempt."""
    group: int
    """The same for those that go to one worker together."""
    since_s: float
    """When it was taken in."""
    worker: WorkerName = NO_WORKER
    cancelled: str = ""
    num_crashes: int = 0
    """Workers that died while its code was running, …"""
    num_kills: int = 0
    """… and those that were killed from outside just then."""

    @property
    def key(self) -> RolloutId:
        return self.run.rollout_id

    @property
    def where(self) -> str:
        return f"task '{self.run.task.id}'"

    def settled(self, outcome: Outcome) -> Settled:
        """Its end, in its client's words."""
        return Settled(self.id, self.run.attempt, self.worker, outcome)

    def given(self, worker: WorkerName, now_s: float) -> Run:
        """It runs there from now on: what that worker is told."""
        self.worker = worker
        return msgspec.structs.replace(self.run, queued_s=now_s - self.since_s)

    def leave(self) -> None:
        """Its worker is lost: another will try again."""
        self.run = msgspec.structs.replace(self.run, attempt=self.run.attempt + 1)
        self.worker = NO_WORKER


class OpenRuns:
    """Entries by key and by their client's id. An answered one is forgotten."""

    def __init__(self) -> None:
        self._entries: dict[RolloutId, OpenRun] = {}
        self._by_client: dict[bytes, dict[RolloutId, RolloutId]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, client: bytes, runs: tuple[Run, ...], now_s: float) -> list[OpenRun]:
        """Entries of runs that go together, without those that are owed already."""
        mine = self._by_client.setdefault(client, {})
        group = self._serial + 1
        added = []
        for run in runs:
            if run.rollout_id in mine:
                continue
            self._serial += 1
            key = key_of(run.rollout_id, self._serial)
            ours = msgspec.structs.replace(run, rollout_id=key)
            entry = OpenRun(client, run.rollout_id, ours, group, now_s)
            mine[entry.id] = key
            self._entries[key] = entry
            added.append(entry)
        return added

    def __getitem__(self, key: RolloutId) -> OpenRun:
        return self._entries[key]

    def get(self, key: RolloutId) -> OpenRun | None:
        return self._entries.get(key)

    def find(self, client: bytes, id: RolloutId) -> OpenRun | None:
        key = self._by_client.get(client, {}).get(id)
        return None if key is None else self._entries[key]

    def of(self, client: bytes) -> list[OpenRun]:
        return [self._entries[key] for key in self._by_client.get(client, {}).values()]

    def all(self) -> list[OpenRun]:
        return list(self._entries.values())

    def forget(self, entry: OpenRun) -> None:
        del self._entries[entry.key]
        mine = self._by_client[entry.client]
        del mine[entry.id]
        if not mine:
            del self._by_client[entry.client]


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
