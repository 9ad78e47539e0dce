"""A part that dies before it has heard what it is for."""

import pytest

from rollway.errors import PartDied
from rollway.loop.part import start_part

pytestmark = pytest.mark.anyio


async def test_a_part_that_dies_before_it_is_told_anything_is_a_dead_part() -> None:
    config = {"large": bytes(32 << 20)}  # more than a pipe holds: the child is gone while it is sent
    async with start_part("gone", "rollway.no_such_module:main", config) as part:
        with pytest.raises(PartDied, match=r"gone .* exited with 1"):
            await part.listen(lambda stats: None, lambda body: None)
