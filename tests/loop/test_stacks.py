"""Whom a stack accuses."""

import faulthandler
import subprocess
import sysconfig
import tempfile

import pytest

import rollway
from rollway.loop.watch.stacks import (
    StackLine,
    culprit,
    dump,
    entered,
    is_waiting,
    of_dump,
    of_traceback,
)

STDLIB = sysconfig.get_path("stdlib")
OURS = rollway.__file__.removesuffix("__init__.py")

SLEEPS = StackLine(f"{STDLIB}/subprocess.py", 1264, "communicate")
LOOP = StackLine(f"{STDLIB}/asyncio/events.py", 80, "_run")
RUNNER = StackLine(f"{OURS}envserver/rollout.py", 90, "_converse")
MINE = StackLine("/home/me/envs/my_env.py", 12, "rollout")
HELPER = StackLine("/home/me/envs/helper.py", 3, "wait")
INSTALLED = StackLine("/v/lib/python3.11/site-packages/my_env/env.py", 7, "rollout")
REQUESTS = StackLine("/v/lib/python3.11/site-packages/requests/api.py", 59, "get")


def test_the_users_innermost_line_is_blamed() -> None:
    assert culprit([SLEEPS, HELPER, MINE, RUNNER, LOOP]) == HELPER
    assert culprit([SLEEPS, REQUESTS, MINE, RUNNER, LOOP]) == MINE
    assert entered([SLEEPS, HELPER, MINE, RUNNER, LOOP]) == MINE


def test_an_installed_environment_is_blamed_rather_than_what_it_calls() -> None:
    assert culprit([SLEEPS, REQUESTS, INSTALLED, RUNNER, LOOP]) == INSTALLED


def test_our_own_code_is_blamed_when_nobody_else_is_there() -> None:
    assert culprit([SLEEPS, RUNNER, LOOP]) == RUNNER
    assert culprit([LOOP]) == LOOP
    assert entered([SLEEPS, RUNNER, LOOP]) is None


def test_a_loop_that_waits_holds_nobody_up() -> None:
    runner = StackLine(f"{STDLIB}/asyncio/runners.py", 118, "Runner.run")
    assert is_waiting([runner, RUNNER])
    assert is_waiting([StackLine(f"{STDLIB}/selectors.py", 468, "EpollSelector.select"), LOOP, runner])
    assert not is_waiting([MINE, runner, RUNNER])


def test_a_dump_is_read_back() -> None:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        first = of_dump(file.read().decode())[0]
    assert first.file == __file__
    assert first.function == "test_a_dump_is_read_back"
    assert of_dump(dump([SLEEPS, MINE]) + dump([HELPER, RUNNER])) == [HELPER, RUNNER], "the last one"
    assert of_dump("") == []


def test_a_traceback_names_the_callers_line() -> None:
    with pytest.raises(OSError, match="/nowhere") as raised:
        subprocess.run(["/nowhere/at/all"], check=False)
    assert culprit(of_traceback(raised.tb)).file == __file__
