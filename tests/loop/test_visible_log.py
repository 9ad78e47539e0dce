"""A log has one line for each record, whatever its text is."""

import logging

from rollway.loop.processes.child import VisibleFormatter


def test_records_neither_act_on_a_terminal_nor_look_like_other_records() -> None:
    try:
        raise ValueError("bad\x1b[2J\n2026-01-01 INFO launcher: all is well\x9b")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.INFO, "f", 1, "task %s", ("7\n[/b]\r",), info)
    first, *others = VisibleFormatter("%(message)s").format(record).split("\n")
    assert first == "task 7"
    assert others[0] == r"    [/b]\r"
    assert all(line.startswith("    ") for line in others)
    assert others[-2:] == [
        r"    ValueError: bad\x1b[2J",
        r"    2026-01-01 INFO launcher: all is well\x9b",
    ]
