"""Parts that die, and how their end is described."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from rollway.errors import PartDied
from rollway.loop.processes import child
from rollway.loop.processes.part import MAX_LOG_BYTES, cut_log, describe_exit, start_part

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


async def test_a_dead_process_is_noticed_and_what_it_left_is_ended() -> None:
    """Both that are ended have left the session. One that is not found lives on and holds the pipe open,
    so nothing but the end of the process shows that it has died."""
    async with child.start("leaver", "tests.doubles.leavers:leave_daemon") as process:
        frame = await process.pipe.receive()
        assert frame is not None
        *left, hidden = [psutil.Process(int(pid)) for pid in frame.split()]
        try:
            async with asyncio.timeout(60):
                assert await process.pipe.receive() is None
            assert hidden.is_running()
        finally:
            hidden.kill()
    assert await process.wait() == -9
    gone, alive = psutil.wait_procs(left, timeout=60)
    assert (len(gone), alive) == (2, [])


async def test_the_log_of_a_part_stays_bounded_while_it_lives(tmp_path: Path) -> None:
    log = tmp_path / "printer.log"
    entry = "tests.doubles.leavers:print_much"
    async with start_part("printer", entry, {}, log=log, look_at_log_s=0.1) as part:
        async with asyncio.timeout(60):
            while not log.exists() or b"cut here" not in log.read_bytes():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert psutil.pid_exists(part.pid), "it was cut while the part lives"
    assert log.stat().st_size < MAX_LOG_BYTES


async def test_children_inherit_nothing() -> None:
    async with child.start("lister", "tests.doubles.leavers:list_descriptors") as process:
        frame = await process.pipe.receive()
    assert frame is not None
    assert json.loads(frame) == [0, 1, 2, 3], "3 is the listing itself"


async def test_a_part_that_writes_garbage_into_its_pipe_dies_alone() -> None:
    async with start_part("garbler", "tests.doubles.leavers:write_garbage", {}) as part:
        with pytest.raises(
            PartDied, match=r"garbler .*its pipe holds bytes that are not a message"
        ):
            await part.listen(lambda stats: None, lambda body: None)


def test_a_log_keeps_its_beginning_and_what_is_written_later(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    with log.open("ab") as file:
        file.write(b"first error\n" + b"x" * 4_000)
        file.flush()
        cut_log(log, 5_000)
        assert log.stat().st_size > 4_000, "small enough"
        cut_log(log, 1_000)
        file.write(b"last error\n")
    text = log.read_text()
    assert text.startswith("first error\n")
    assert "cut here" in text
    assert text.endswith("last error\n")
    assert len(text) < 1_000
