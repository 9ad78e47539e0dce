"""Parts that die: before they have heard what they are for, and how that is told."""

import pytest

from rollway.errors import PartDied
from rollway.loop.processes.part import how_it_ended, start_part

pytestmark = pytest.mark.anyio


async def test_a_part_that_dies_before_it_is_told_anything_is_a_dead_part() -> None:
    config = {"large": bytes(32 << 20)}  # more than a pipe holds: the child is gone while it is sent
    async with start_part("gone", "rollway.no_such_module:main", config) as part:
        with pytest.raises(PartDied, match=r"gone .* exited with 1"):
            await part.listen(lambda stats: None, lambda body: None)


@pytest.mark.parametrize(
    ("code", "said"),
    [(3, "exited with 3"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")],
)
def test_an_end_in_words(code: int, said: str) -> None:
    assert how_it_ended(code) == said
