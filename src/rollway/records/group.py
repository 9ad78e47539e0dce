"""A closed group: all rollouts of one task have settled."""

from typing import Literal

from msgspec import Struct

from .ids import GroupId, PolicyVersion, RolloutId
from .payload import PayloadRef
from .rollout import Cancelled, Failed, Scored

Fate = Literal["trained", "zero_advantage", "filtered", "too_few", "stale", "eval"]
"""The fate of a closed group. Groups of evaluations never train."""


class Member(Struct, frozen=True):
    rollout_id: RolloutId
    scored: Scored


class Group(Struct, frozen=True):
    id: GroupId
    env: str
    task_id: str
    members: tuple[Member, ...]
    failed: tuple[tuple[RolloutId, Failed], ...] = ()
    cancelled: tuple[tuple[RolloutId, Cancelled], ...] = ()


class ClosedGroup(Struct, frozen=True):
    """A group that has been judged: the advantages of its members, in order, and its fate."""

    group: Group
    advantages: tuple[float, ...]
    fate: Fate
    left_out: tuple[RolloutId, ...] = ()
    """Members that do not train although their group does."""

    @property
    def num_trained(self) -> int:
        return len(self.group.members) - len(self.left_out)

    @property
    def num_tokens(self) -> int:
        """The tokens of the rollouts that train."""
        members, left_out = self.group.members, self.left_out
        trained = [member.scored for member in members if member.rollout_id not in left_out]
        return sum(scored.num_tokens for scored in trained)

    @property
    def refs(self) -> list[PayloadRef]:
        """The payload of all members, also of those that are left out."""
        return [member.scored.ref for member in self.group.members]

    @property
    def first_version(self) -> PolicyVersion:
        """The oldest version under which any of its members began."""
        return min(member.scored.first_version for member in self.group.members)
