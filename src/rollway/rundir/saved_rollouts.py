"""Saved rollouts: the lines of `rollouts/step_N/train.jsonl` and `eval.jsonl`, made and read back."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ..config.plan import env_name
from ..errors import UNREADABLE
from ..records.group import ClosedGroup, Member
from ..records.task import Message
from .rundir import RunDir, numbered


class SavedRollout(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line. Keys that the rollout's outcome does not have are None here and absent in the file."""

    rollout: str
    group: int
    env: str
    task: str
    fate: str
    outcome: str
    """`scored`, `failed` or `cancelled`."""
    step: int = 0
    """The step in the folder's name, which the reader fills in. It is not in the file."""

    reward: float | None = None
    rewards: dict[str, float] | None = None
    metrics: dict[str, float] | None = None
    advantage: float | None = None
    num_turns: int | None = None
    num_tokens: int | None = None
    stop: str | None = None
    first_version: int | None = None
    last_version: int | None = None
    is_approximate: bool = False
    """A row of it has token ids or logprobs that the endpoint did not give."""
    timing: dict[str, float] | None = None
    messages: msgspec.Raw = msgspec.Raw()
    """The transcript as JSON, copied from the payload without being parsed; empty unless scored."""

    boundary: str | None = None
    error: str | None = None
    traceback: str | None = None
    where: str | None = None
    type: str | None = None
    """Repeats `outcome` in the line of a failed rollout."""

    reason: str | None = None
    """Why it was cancelled."""

    def read_messages(self) -> tuple[Message, ...]:
        """Return the messages of the transcript; none if the rollout was not scored."""
        if not self.messages:
            return ()
        return msgspec.json.decode(self.messages, type=tuple[Message, ...])


_decoder: msgspec.json.Decoder[SavedRollout] = msgspec.json.Decoder(SavedRollout)


def group_to_save(
    closed: ClosedGroup, read_transcript: Callable[[Member], msgspec.Raw]
) -> Iterator[SavedRollout]:
    """Yield what is saved of every rollout of a group, reading one transcript at a time."""
    group = closed.group
    names = {"env": env_name(group.env), "task": group.task_id, "fate": closed.fate}
    head: dict[str, Any] = {"group": group.id, **names}
    for member, advantage in zip(group.members, closed.advantages, strict=True):
        scored = member.scored
        yield SavedRollout(
            **head,
            rollout=member.rollout_id,
            outcome="scored",
            reward=scored.reward,
            rewards=scored.rewards,
            metrics=scored.metrics,
            advantage=advantage,
            num_turns=scored.num_turns,
            num_tokens=scored.num_tokens,
            stop=scored.stop,
            first_version=scored.first_version,
            last_version=scored.last_version,
            is_approximate=any(row.is_approximate for row in scored.rows),
            timing=msgspec.structs.asdict(scored.timing),
            messages=read_transcript(member),
        )
    for rollout_id, failed in group.failed:
        failure = msgspec.to_builtins(failed)
        yield SavedRollout(**head, rollout=rollout_id, outcome="failed", **failure)
    for rollout_id, cancelled in group.cancelled:
        yield SavedRollout(
            **head, rollout=rollout_id, outcome="cancelled", reason=cancelled.reason
        )


def decode_saved(line: bytes) -> SavedRollout | None:
    """Return the rollout of a line; None if the line is torn."""
    try:
        return _decoder.decode(line)
    except UNREADABLE:
        return None


def saved_rollouts(
    run: RunDir, step: int | None = None, torn: Counter[Path] | None = None
) -> Iterator[SavedRollout]:
    """Yield the rollouts of one step, or of all, in the order they were written. Lines that cannot be
    read are counted in `torn`."""
    torn = Counter() if torn is None else torn
    for number, path in _files(run):
        if step is not None and number != step:
            continue
        for line in path.read_bytes().splitlines():
            rollout = decode_saved(line)
            if rollout is None:
                torn[path] += 1
            else:
                yield msgspec.structs.replace(rollout, step=number)


def saved_steps(run: RunDir) -> list[int]:
    return sorted({number for number, _ in _files(run)})


def _files(run: RunDir) -> list[tuple[int, Path]]:
    folders = numbered(run.rollouts)
    return sorted((step, path) for step, folder in folders for path in folder.glob("*.jsonl"))
