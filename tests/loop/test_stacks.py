"""Which line of a stack is named."""

import faulthandler
import subprocess
import sysconfig
import tempfile

import pytest

import rollway
from rollway.loop.watch.stacks import (
    StackLine,
    dump,
    find_entry_line,
    find_user_line,
    from_error,
    is_waiting,
    parse_dump,
)

STDLIB = sysconfig.get_path("stdlib")
ROLLWAY = rollway.__file__.removesuffix("__init__.py")

SLEEPS = StackLine(f"{STDLIB}/subprocess.py", 1264, "communicate")
LOOP = StackLine(f"{STDLIB}/asyncio/events.py", 80, "_run")
RUNNER = StackLine(f"{ROLLWAY}envserver/rollout.py", 90, "_converse")
USER = StackLine("/home/me/envs/my_env.py", 12, "rollout")
HELPER = StackLine("/home/me/envs/helper.py", 3, "wait")
INSTALLED = StackLine("/v/lib/python3.11/site-packages/my_env/env.py", 7, "rollout")
REQUESTS = StackLine("/v/lib/python3.11/site-packages/requests/api.py", 59, "get")


def test_the_innermost_line_of_the_users_files_is_named() -> None:
    assert find_user_line([SLEEPS, HELPER, USER, RUNNER, LOOP]) == HELPER
    assert find_user_line([SLEEPS, REQUESTS, USER, RUNNER, LOOP]) == USER
    assert find_entry_line([SLEEPS, HELPER, USER, RUNNER, LOOP]) == USER


def test_an_installed_environment_is_named_rather_than_a_package_it_calls() -> None:
    assert find_user_line([SLEEPS, REQUESTS, INSTALLED, RUNNER, LOOP]) == INSTALLED


def test_rollways_code_is_named_when_no_other_is_on_the_stack() -> None:
    assert find_user_line([SLEEPS, RUNNER, LOOP]) == RUNNER
    assert find_user_line([LOOP]) == LOOP
    assert find_entry_line([SLEEPS, RUNNER, LOOP]) is None


def test_a_waiting_loop_is_recognised() -> None:
    runner = StackLine(f"{STDLIB}/asyncio/runners.py", 118, "Runner.run")
    assert is_waiting([runner, RUNNER])
    assert is_waiting(
        [StackLine(f"{STDLIB}/selectors.py", 468, "EpollSelector.select"), LOOP, runner]
    )
    assert not is_waiting([USER, runner, RUNNER])


def test_a_dump_is_read_back() -> None:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        first = parse_dump(file.read().decode())[0]
    assert first.file == __file__
    assert first.function == "test_a_dump_is_read_back"
    assert parse_dump(dump([SLEEPS, USER]) + dump([HELPER, RUNNER])) == [HELPER, RUNNER], (
        "the last stack counts"
    )
    assert parse_dump("") == []


def test_a_traceback_names_the_callers_line() -> None:
    with pytest.raises(OSError, match="/nowhere") as raised:
        subprocess.run(["/nowhere/program"], check=False)
    assert find_user_line(from_error(raised.value)).file == __file__
