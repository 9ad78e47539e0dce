"""Every toolset of a worker is closed with it."""

from typing import Any

import pytest

import rollway as rw
from rollway.envserver.worker.toolsets import OpenToolsets

pytestmark = pytest.mark.anyio


class Door(rw.Toolset):
    scope = "worker"
    is_open = False

    async def __aenter__(self) -> "Door":
        self.is_open = True
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.is_open = False


class Jammed(Door):
    async def __aexit__(self, *_: Any) -> None:
        raise KeyError("jammed")


class BackDoor(Door):
    pass


class ReturnsNothing(Door):
    scope = "rollout"

    async def __aenter__(self) -> None:  # type: ignore[override]
        self.is_open = True


async def test_a_toolset_that_does_not_return_itself_is_open_all_the_same() -> None:
    door = ReturnsNothing()
    async with OpenToolsets(5.0) as toolsets, toolsets.opened([door], None) as opened:
        assert opened == (door,)


async def test_a_toolset_that_cannot_be_closed_keeps_no_other_open() -> None:
    front, jammed, back = Door(), Jammed(), BackDoor()
    with pytest.raises(KeyError, match="jammed"):
        async with (
            OpenToolsets(5.0) as toolsets,
            toolsets.opened([front, jammed, back], None) as opened,
        ):
            assert all(door.is_open for door in opened if isinstance(door, Door))
    assert (front.is_open, jammed.is_open, back.is_open) == (False, True, False)
