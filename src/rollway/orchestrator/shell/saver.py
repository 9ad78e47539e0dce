"""Writes settled rollouts as JSONL. Runs in the thread lane: transcripts are bytes that are copied,
never parsed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ...errors import UNREADABLE
from ...payload.reader import SegmentReader
from ...records.group import ClosedGroup, Member
from ...rundir.rundir import write_whole


def save(folder: Path, path: Path, closed: Iterable[ClosedGroup]) -> None:
    """Append a line for each rollout: what was said, what it was worth, what became of it."""
    reader = SegmentReader(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for one in closed:
            for line in _lines(one, reader):
                file.write(msgspec.json.encode(line) + b"\n")


def forget_trained(path: Path) -> None:
    """Take out the lines of a batch that is about to be written once more, and a torn last one."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        write_whole(path, b"".join(line for line in lines if _is_kept(line)))


def _is_kept(line: bytes) -> bool:
    try:
        return msgspec.json.decode(line, type=_Line).fate != "trained"
    except UNREADABLE:
        return False


class _Line(msgspec.Struct):
    fate: str


def _lines(closed: ClosedGroup, reader: SegmentReader) -> Iterable[dict[str, Any]]:
    group = closed.group
    head = {"group": group.id, "env": group.env, "task": group.task_id, "fate": closed.fate}
    for member, advantage in zip(group.members, closed.advantages, strict=True):
        yield {**head, **_scored(member), "advantage": advantage, "messages": _said(member, reader)}
    for id, failed in group.failed:
        yield {**head, "rollout": id, "outcome": "failed", **msgspec.to_builtins(failed)}
    for id, cancelled in group.cancelled:
        yield {**head, "rollout": id, "outcome": "cancelled", "reason": cancelled.reason}


def _scored(member: Member) -> dict[str, Any]:
    scored = member.scored
    return {
        "rollout": member.rollout_id,
        "outcome": "scored",
        "reward": scored.reward,
        "rewards": scored.rewards,
        "metrics": scored.metrics,
        "num_turns": scored.num_turns,
        "num_tokens": scored.num_tokens,
        "stop": scored.stop,
        "first_version": scored.first_version,
        "last_version": scored.last_version,
        "timing": scored.timing,
    }


def _said(member: Member, reader: SegmentReader) -> msgspec.Raw:
    return msgspec.Raw(reader.open(member.scored.ref)["transcript"].tobytes())
