"""Rollouts that clients have sent and the server has not answered yet. Pure."""

from msgspec import Struct
from msgspec.structs import replace

from ...records.ids import RolloutId, WorkerName
from ...records.rollout import Outcome, Settled
from ...wire.messages import Run


class OpenRun(Struct):
    """One rollout: which client sent it, under which id, and what has happened to it so far."""

    client: bytes
    rollout_id: RolloutId
    """The id that the client chose."""
    message: Run
    """The run as workers get it: with the key as its id, and the current attempt."""
    unit: int
    """Runs with the same number go to one worker together."""
    since_s: float
    """When the router received the run."""
    worker: WorkerName | None = None
    cancel_reason: str = ""
    num_crashes: int = 0
    """How many workers died while this rollout's code was running."""
    num_kills: int = 0
    """How many workers were killed from outside while this rollout's code was running."""
    num_losses: int = 0
    """How many workers died that ran this rollout beside others, and nothing showed why."""

    @property
    def key(self) -> RolloutId:
        return self.message.rollout_id

    @property
    def where(self) -> str:
        return f"task '{self.message.task.id}'"

    def settled(self, outcome: Outcome) -> Settled:
        """Return the rollout's end as its client must hear it."""
        worker = self.worker or WorkerName("")
        return Settled(self.rollout_id, self.message.attempt, worker, outcome)

    def assign(self, worker: WorkerName, now_s: float) -> Run:
        """Note that the rollout runs in this worker from now on. Return the run to send there."""
        self.worker = worker
        return replace(self.message, queued_s=now_s - self.since_s)

    def unassign(self) -> None:
        """Note that the rollout's worker is lost. Another worker will make the next attempt."""
        self.message = replace(self.message, attempt=self.message.attempt + 1)
        self.worker = None


class OpenRuns:
    """Open runs by key, and by client and the client's id. A run that is answered is removed."""

    def __init__(self) -> None:
        self._runs: dict[RolloutId, OpenRun] = {}
        self._keys: dict[bytes, dict[RolloutId, RolloutId]] = {}
        """The key of each of a client's ids."""
        self._last_serial = 0
        self._numbers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, client: bytes, runs: tuple[Run, ...], now_s: float) -> list[OpenRun]:
        """Add runs that go to one worker together, without those that are open already."""
        keys = self._keys.setdefault(client, {})
        unit = self._last_serial + 1
        added = []
        for run in runs:
            if run.rollout_id in keys:
                continue
            self._last_serial = serial = self._last_serial + 1
            # the key is readable in logs and unique in the server
            key = RolloutId(f"{run.rollout_id}#{serial}")
            keyed = replace(run, rollout_id=key, serial=serial, client=self.number_of(client))
            keys[run.rollout_id] = key
            self._runs[key] = OpenRun(client, run.rollout_id, keyed, unit, now_s)
            added.append(self._runs[key])
        return added

    def number_of(self, client: bytes) -> int:
        """Return the number by which workers tell clients apart."""
        return self._numbers.setdefault(client, len(self._numbers) + 1)

    def __getitem__(self, key: RolloutId) -> OpenRun:
        return self._runs[key]

    def get(self, key: RolloutId) -> OpenRun | None:
        return self._runs.get(key)

    def find(self, client: bytes, rollout_id: RolloutId) -> OpenRun | None:
        key = self._keys.get(client, {}).get(rollout_id)
        return None if key is None else self._runs[key]

    def of(self, client: bytes) -> list[OpenRun]:
        return [self._runs[key] for key in self._keys.get(client, {}).values()]

    def all(self) -> list[OpenRun]:
        return list(self._runs.values())

    def remove(self, run: OpenRun) -> None:
        del self._runs[run.key]
        keys = self._keys[run.client]
        del keys[run.rollout_id]
        if not keys:
            del self._keys[run.client]
