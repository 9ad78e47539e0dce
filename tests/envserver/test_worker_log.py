"""The lines that a worker writes into its log."""

import logging

import pytest

from rollway.envserver.worker.worker_log import WINDOWS, WorkerLog
from rollway.loop.watch.lag import summarise
from rollway.records.lag import ProcessStats


def test_one_line_sums_up_ten_windows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker_log = WorkerLog(place=3)
    for second in range(2 * WINDOWS):
        lag = summarise([0.0001] * 98 + [0.001, 0.008 if second == 4 else 0.001])
        worker_log.add(ProcessStats("some.env.w3", lag, 312_000_000, in_flight=41))
    first, second = (record.message for record in caplog.records)
    assert first.startswith(
        "W3 | 41 active | Lag: med=0.1ms p90=0.1ms p99=1.0ms max=8.0ms | RSS 312MB"
    )
    assert "max=1.0ms" in second, "each window counts once"
