"""Parts that die, and how their end is described."""

import pytest

from rollway.errors import PartDied
from rollway.loop.processes.part import describe_exit, start_part

pytestmark = pytest.mark.anyio


async def test_a_part_that_dies_before_it_reads_its_spec_is_reported_as_dead() -> None:
    spec = {
        "large": bytes(32 << 20)
    }  # more than a pipe holds: the child dies while it is sent
    async with start_part("gone", "rollway.no_such_module:main", spec) as part:
        with pytest.raises(PartDied, match=r"gone .* exited with 1"):
            await part.listen(lambda stats: None, lambda body: None)


@pytest.mark.parametrize(
    ("code", "text"),
    [(3, "exited with 3"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")],
)
def test_exit_codes_are_described_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text
