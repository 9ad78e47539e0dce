"""Gives rollouts to workers. Each is answered exactly once: by its worker, or from here. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ...config.sections import ServerConfig
from ...records.ids import RolloutId, WorkerName
from ...records.rollout import Cancelled, Failed, Settled
from ...wire.messages import Cancel, FrameTaken, RolloutProgress, Run, RunGroup, WorkerLost
from .blame import Loss, describe_loss, find_accused, verdict
from .events import (
    Commands,
    LogNote,
    RouterCommand,
    SendToClient,
    SendToWorker,
    WorkerMessage,
)
from .open_runs import OpenRun, OpenRuns
from .run_queue import RunQueue
from .worker_pool import WorkerPool

ENDING = Cancelled("the env server is ending")


def longest_rollout_s(server: ServerConfig) -> float:
    """Return after how long a rollout has certainly ended in a healthy worker: all its deadlines, and
    all waiting for lanes and for other members of its group."""
    return (
        4 * (server.rollout_deadline_s + server.scoring_deadline_s + server.tool_deadline_s)
        + 60
    )


class RouterDispatch:
    """The open rollouts: which wait, and which run in which worker."""

    def __init__(self, pool: WorkerPool, max_waiting: int, lease_s: float) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self._due_s: dict[RolloutId, float] = {}
        """When each running rollout must have ended, in the order of these times."""
        self._max_waiting = max_waiting
        self._frames = FramesInTransit()
        self._now_s = 0.0
        self.open_runs = OpenRuns()
        self.waiting = RunQueue()
        self.whole_groups = False
        self.is_stopping = False
        self.num_late = 0
        """Ends that came after their attempt was given up."""
        self.num_twice = 0
        """Runs of rollouts that were open already."""

    def at(self, now_s: float) -> None:
        """Let time pass. Events that carry no time pass 0."""
        self._now_s = max(self._now_s, now_s)

    def take(self, client: bytes, runs: tuple[Run, ...]) -> Commands:
        """Take runs that go to one worker together. A run that is open already is not taken twice."""
        added = self.open_runs.add(client, runs, self._now_s)
        self.num_twice += len(runs) - len(added)
        if self.is_stopping:
            return [self._end(run, ENDING) for run in added]
        limit = self._max_waiting
        if self.waiting.count(client) + len(added) > limit:
            text = f"this client has {limit} rollouts waiting already, the most a server keeps for one"
            return [self._end(run, Failed("worker", text)) for run in added]
        if added:
            self.waiting.add(client, [run.key for run in added])
        return self.assign()

    def assign(self) -> Commands:
        """Give waiting runs to the workers with the most room. If the next group needs more room than
        any worker has, the runs behind it wait too."""
        commands: Commands = []
        while unit := self.waiting.next_unit():
            taken = [self.open_runs[key] for key in unit]
            num_losses = max(run.num_losses for run in taken)
            worker = self._pool.freest(len(taken), num_losses)
            if worker is None:
                break
            self.waiting.take()
            for run in taken:
                self._pool.give(worker, run.key, num_losses)
                self._due_s[run.key] = self._now_s + self._lease_s
            runs = tuple(run.assign(worker, self._now_s) for run in taken)
            is_group = self.whole_groups or len(runs) > 1
            message = RunGroup.of(runs) if is_group else runs[0]
            commands.append(SendToWorker(worker, message))
        return commands

    def cancel(self, client: bytes, rollout_id: RolloutId, reason: str) -> Commands:
        """Cancel a rollout: at once if it waits, else when its worker says so, or is lost."""
        run = self.open_runs.find(client, rollout_id)
        if run is None:
            return []
        if run.worker is None:
            return [self._end(run, Cancelled(reason)), *self.assign()]
        run.cancel_reason = reason or "cancelled"
        return [SendToWorker(run.worker, Cancel(run.key, reason))]

    def leave(self, client: bytes, reason: str) -> Commands:
        """Cancel the rollouts of a client that seems gone, and answer them in case it is still there."""
        commands: Commands = []
        for run in self.open_runs.of(client):
            if run.worker is not None and not run.cancel_reason:
                commands.append(SendToWorker(run.worker, Cancel(run.key, reason)))
            commands.append(self._end(run, Cancelled(reason)))
        lost = self._frames.lost_with(client)
        commands += [SendToWorker(worker, FrameTaken(worker, size)) for worker, size in lost]
        return commands + self.assign()

    def settle(self, event: WorkerMessage, settled: Settled) -> Commands:
        """Pass a rollout's end on to its client, once. An end is dropped if its attempt was given up
        or its client has left."""
        worker, size, key = event.worker, event.num_bytes, settled.rollout_id
        was_running = self._pool.give_back(worker, key)
        run = self.open_runs.get(key)
        if run is None or run.worker != worker or run.message.attempt != settled.attempt:
            if not was_running:
                self.num_late += 1
            dropped: Commands = []
            if size:
                dropped.append(SendToWorker(worker, FrameTaken(worker, size)))
            return dropped + self.assign()
        self._frames.sent(run.client, worker, size)
        self._remove(run)
        answer = replace(settled, rollout_id=run.rollout_id)
        return [SendToClient(run.client, answer, event.frame), *self.assign()]

    def frame_taken(self, client: bytes, worker: WorkerName, num_bytes: int) -> Commands:
        taken = self._frames.taken(client, worker, num_bytes)
        return [SendToWorker(worker, FrameTaken(worker, taken))] if taken else []

    def lose_worker(
        self, keys: Iterable[RolloutId], loss: Loss
    ) -> tuple[Commands, WorkerLost]:
        """Move a lost worker's rollouts to others, members of a group together. A rollout that is to
        blame, or has lost too many workers, fails."""
        self._frames.forget(loss.worker)
        commands: Commands = []
        units: dict[tuple[bytes, int], list[RolloutId]] = {}
        num_failed = 0
        still_open = [run for key in keys if (run := self.open_runs.get(key)) is not None]
        accused = find_accused(still_open, loss)
        for run in sorted(still_open, key=lambda lost: lost.message.serial):
            end = self._end_after_loss(run, loss, accused)
            if end is None:
                run.unassign()
                del self._due_s[run.key]
                units.setdefault((run.client, run.unit), []).append(run.key)
                continue
            if isinstance(end, Failed):
                num_failed += 1
                # No worker will log this failure.
                place = f"{end.boundary}, attempt {run.message.attempt}"
                commands.append(
                    LogNote(f"{run.key} ({run.where}) failed ({place}): {end.text}")
                )
            commands.append(self._end(run, end))
        for (client, _), unit in reversed(units.items()):
            self.waiting.add(client, unit, first=True)
        num_moved = sum(len(unit) for unit in units.values())
        why = describe_loss(loss, accused)
        return commands + self.assign(), WorkerLost(loss.worker, num_moved, num_failed, why)

    def overdue(self) -> list[OpenRun]:
        """Return the rollouts that should have ended by now, whatever their code does."""
        found = []
        for key, due_s in self._due_s.items():
            if due_s > self._now_s:
                break
            found.append(self.open_runs[key])
        return found

    def end_overdue(self, run: OpenRun) -> Commands:
        """End a rollout whose worker does not say how it ended. An end that still comes is dropped."""
        worker, key = run.worker, run.key
        assert worker is not None
        self._pool.give_back(worker, key)
        text = f"{worker} did not report its end within {self._lease_s:g} s"
        reason = "its server waits no longer"
        return [
            SendToWorker(worker, Cancel(key, reason)),
            LogNote(f"{key} ({run.where}) failed (worker): {text}"),
            self._end(run, Failed("worker", text)),
        ]

    def _remove(self, run: OpenRun) -> None:
        self.open_runs.remove(run)
        self._due_s.pop(run.key, None)

    def progress(
        self, worker: WorkerName, rollouts: Iterable[RolloutProgress]
    ) -> dict[bytes, list[RolloutProgress]]:
        """Return a worker's rollouts by client, each under the id that its client chose."""
        by_client: dict[bytes, list[RolloutProgress]] = {}
        for rollout in rollouts:
            run = self.open_runs.get(rollout.rollout_id)
            if run is not None and run.worker == worker:
                renamed = replace(rollout, rollout_id=run.rollout_id)
                by_client.setdefault(run.client, []).append(renamed)
        return by_client

    def stop(self) -> Commands:
        """Take no more runs, and end those that wait."""
        self.is_stopping = True
        return [self._end(run, ENDING) for run in self.open_runs.all() if run.worker is None]

    def end(self) -> Commands:
        return [self._end(run, ENDING) for run in self.open_runs.all()]

    def _end_after_loss(
        self, run: OpenRun, loss: Loss, accused: Sequence[OpenRun]
    ) -> Cancelled | Failed | None:
        """Return how a lost worker's rollout ends, or None if it may run again."""
        if run.cancel_reason:
            return Cancelled(run.cancel_reason)
        end = verdict(run, loss, accused)
        return end or (ENDING if self.is_stopping else None)

    def _end(self, run: OpenRun, outcome: Cancelled | Failed) -> RouterCommand:
        self.waiting.remove(run.key)
        self._remove(run)
        return SendToClient(run.client, run.settled(outcome))


class FramesInTransit:
    """Bytes of raw frames that were sent and not yet taken, by client and worker."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[bytes, WorkerName]] = Counter()

    def sent(self, client: bytes, worker: WorkerName, num_bytes: int) -> None:
        if num_bytes:
            self._bytes[client, worker] += num_bytes

    def taken(self, client: bytes, worker: WorkerName, num_bytes: int) -> int:
        """Return how many of the bytes that a client says it took had been sent to it."""
        sent = self._bytes.pop((client, worker), 0)
        if num_bytes < sent:
            self._bytes[client, worker] = sent - num_bytes
        return min(sent, num_bytes)

    def lost_with(self, client: bytes) -> list[tuple[WorkerName, int]]:
        """Return, by worker, the bytes that were on their way to a client that is gone."""
        keys = [key for key in self._bytes if key[0] == client]
        return [(key[1], self._bytes.pop(key)) for key in keys]

    def forget(self, worker: WorkerName) -> None:
        for key in [key for key in self._bytes if key[1] == worker]:
            del self._bytes[key]
