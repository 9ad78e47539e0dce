"""`metrics.jsonl` as it is after a crash: readers see complete lines only."""

import resource
import signal
from pathlib import Path

import pytest

from rollway.records.ids import Step
from rollway.rundir.metrics_file import MetricsFile
from rollway.rundir.rundir import RunDir

COMPLETE = b'{"step": 1}\n{"step": 2, "loss": 0.5}\n'


def write(folder: Path, data: bytes) -> MetricsFile:
    file = MetricsFile(folder / "metrics.jsonl")
    file.path.write_bytes(data)
    return file


def test_reading_continues_where_it_stopped(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert (list(file.lines()), file.last_step()) == ([], -1)
    file.append(b'{"step": 1}')
    ((step, end, line),) = file.lines()
    assert (step, end, line) == (1, 12, b'{"step": 1}\n')
    file.append(b'{"step": 2, "loss": 0.5}')
    assert [step for step, _, _ in file.lines(end)] == [2]
    assert file.path.read_bytes() == COMPLETE
    assert file.last_step() == 2


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    for torn in (b'{"step": 3, "lo', b'{"step": 3}', b"\0\0", b"{}\n"):
        file = write(tmp_path, COMPLETE + torn)
        assert [step for step, _, _ in file.lines()] == [1, 2], torn


def test_a_resumed_run_drops_the_lines_of_steps_that_it_trains_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.make_folders()
    write(tmp_path, COMPLETE + b'{"step": 3, "lo')
    run.remove_steps_after(Step(1))
    assert run.metrics.read_bytes() == b'{"step": 1}\n'


def test_a_line_that_cannot_be_written_whole_is_not_written_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.append(b'{"step": 1}')
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            file.append(b'{"step": 2, "note": "' + b"x" * 200 + b'"}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    file.append(b'{"step": 2}')
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
