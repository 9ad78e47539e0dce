"""`rollway eval` as a user runs it: whole processes against servers that answer by what is asked."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from tests.doubles.chat import ChatDouble, chat_double
from tests.doubles.command import Rollway
from tests.doubles.engine import engine_double
from tests.doubles.workspace import MARK, marked_processes

pytestmark = [pytest.mark.anyio, pytest.mark.system]

ENVS = str(Path(__file__).parents[1] / "doubles" / "envs.py")
KEY_VAR = "ROLLWAY_TEST_KEY"
NOWHERE = ("--engine-url", "http://127.0.0.1:1")


def number(said: str) -> int:
    return int(said.rstrip("?"))


def even_ones(said: str, nth: int) -> str:
    """Right for even numbers, and for odd ones the first time."""
    n = number(said)
    return str(n) if n % 2 == 0 or nth == 0 else "no"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VAR, "sesame")


class Command:
    """`rollway eval` and what it said."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.code = 0
        self.out = self.err = ""

    async def end(self) -> "Command":
        out, err = await self.process.communicate()
        self.out, self.err = out.decode(), err.decode()
        self.code = self.process.returncode or 0
        return self


def left_of(folder: Path) -> list[psutil.Process]:
    """Everything started in this folder that still runs."""
    return marked_processes(str(folder))


@asynccontextmanager
async def started(folder: Path, *args: str) -> AsyncIterator[Command]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollway", "eval", *args, cwd=folder,
        env={**os.environ, KEY_VAR: "sesame", MARK: str(folder)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Command(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run(folder: Path, *args: str) -> Command:
    async with started(folder, *args) as command:
        return await command.end()


def counting(double: ChatDouble, *args: str, kind: str = "Counting") -> Sequence[str]:
    return (
        ENVS, "-m", "double", "--engine-url", double.url, "--args", json.dumps({"kind": kind}),
        "--key-var", KEY_VAR, "--workers", "1", *args,
    )  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def value(out: str, name: str) -> str:
    """A row of the table."""
    rows = [line.split(maxsplit=1) for line in out.splitlines() if line.startswith("  ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}[name]


async def test_a_whole_evaluation_of_a_chat_endpoint(
    tmp_path: Path, rollway: Rollway
) -> None:
    async with chat_double(even_ones, key="sesame") as double:
        done = await run(
            tmp_path, *counting(double, "-n", "4", "-r", "2", "-c", "3", "--max-tokens", "9")
        )
        assert done.code == 0, done.err
        assert value(done.out, "reward") == "0.7500 ± 0.1443"
        assert value(done.out, "avg@2") == "0.7500"
        assert (value(done.out, "pass@1"), value(done.out, "pass@2")[:6]) == (
            "0.7500 ± 0.1443",
            "1.0000",
        )
        assert value(done.out, "failed") == "none"
        assert {request["max_tokens"] for request in double.requests} == {9}
        (folder,) = (tmp_path / "outputs" / "eval" / "envs" / "double").iterdir()
        assert f"Results are in {folder}" in done.out
        asked = json.loads((folder / "eval.json").read_text())
        assert (asked["num_tasks"], asked["num_rollouts"], asked["model"]) == (4, 2, "double")
        assert "sesame" not in (folder / "eval.json").read_text()
        check_results(folder)
        assert not list((folder / "payload").iterdir())
        again = rollway(
            "eval", *counting(double, "-n", "4", "-r", "2", "--output", str(folder))
        )
        assert again.code == 1
        assert "holds an evaluation already: continue it with --resume" in again.err


def check_results(folder: Path) -> None:
    results = lines(folder)
    assert {(result["task"], result["rollout"]) for result in results} == {
        (str(task), rollout) for task in range(4) for rollout in range(2)
    }
    for result in results:
        said = [message["content"] for message in result["messages"]]
        assert said == [f"{result['task']}?", result["task"] if result["reward"] else "no"]
        assert (result["rewards"], result["metrics"]) == ({"right": result["reward"]}, {})
        assert (result["stop"], result["num_turns"], result["error"]) == ("stop", 1, None)
        assert result["num_tokens"] == len(said[1])
        assert result["timing"]["total_s"] >= result["timing"]["engine_s"] > 0


async def test_a_token_endpoint(tmp_path: Path, tiny_moe: Path) -> None:
    async with engine_double(tiny_moe, lambda said: str(number(said))) as double:
        done = await run(
            tmp_path, ENVS, "-m", "scripted", "--engine-url", double.url, "--tokens", "--args",
            '{"kind": "ThreeTurns"}', "--tokenizer", str(tiny_moe), "--renderer", "qwen3",
            "--template", '{"enable_thinking": false}', "-n", "2", "-r", "2", "--output", "here",
        )  # fmt: skip
        assert done.code == 0, done.err
        assert value(done.out, "reward").startswith("1.0000")
        assert value(done.out, "turns").endswith("3.00")
        assert len(double.prompts) == 12
        for result in lines(tmp_path / "here"):
            said = [message["content"] for message in result["messages"]]
            assert said == 3 * [f"{result['task']}?", result["task"]]
            assert result["num_tokens"] == 6


async def test_an_embedded_model(tmp_path: Path, tiny_moe: Path) -> None:
    """Nothing but a model folder; its chat template renders."""
    done = await run(
        tmp_path, "reverse-text", "-m", str(tiny_moe), "-n", "3", "-r", "2", "--max-tokens", "8",
        "--max-context", "128", "--output", "here",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert value(done.out, "truncated")
    assert "letters_in_place (metric)" in done.out
    assert len(lines(tmp_path / "here")) == 6


async def test_ctrl_c_and_a_resume_that_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollway: Rollway
) -> None:
    monkeypatch.chdir(tmp_path)
    async with chat_double(lambda said, nth: str(number(said))) as double:
        double.is_held = lambda said: number(said) >= 3
        args = counting(double, "-n", "6", "-r", "2", "-c", "4", "--output", "here")
        async with started(tmp_path, *args) as command:
            await double.until_held(4)
            command.process.send_signal(signal.SIGINT)
            stopped = await command.end()
        assert stopped.code == 130, stopped.err
        assert not left_of(tmp_path)
        assert "6 settled" in stopped.out
        here = tmp_path / "here"
        assert f"repeat the command with --resume --output {here}" in stopped.err
        assert Counter(result["task"] for result in lines(here)) == {"0": 2, "1": 2, "2": 2}
        assert not list((here / "payload").iterdir())
        with (here / "results.jsonl").open("a") as file:
            file.write('{"position": 3, "task": "3", "rol')
        await double.until_held(0)
        double.release.set()
        for other, said in ((("-n", "7"), "-n was 6, is 7"),
                            (("--temperature", "0.5"), "temperature was 1.0, is 0.5")):  # fmt: skip
            refused = rollway("eval", *args, *other, "--resume")
            assert (refused.code, said in refused.err) == (1, True), refused.err
        done = await run(tmp_path, *args, "--resume")
        assert done.code == 0, done.err
        assert "6 of 12 rollouts are done already" in done.out
        assert "12 settled" in done.out
        assert Counter(result["task"] for result in lines(here)) == {
            str(n): 2 for n in range(6)
        }
        assert {double.num_asked[f"{n}?"] for n in range(3)} == {2}, (
            "what was done is not asked again"
        )
        again = await run(tmp_path, *args, "--resume")
        assert again.code == 0
        assert sum(double.num_asked.values()) == 12 + 4, "all done: nothing is asked"


async def test_sigterm_and_sigkill_leave_nothing_running(tmp_path: Path) -> None:
    async with chat_double(lambda said, nth: str(number(said))) as double:
        double.is_held = lambda said: number(said) >= 1
        args = counting(double, "-n", "3", "-c", "2", "--output")
        for how, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
            async with started(tmp_path, *args, how.name) as command:
                await double.until_held(2)
                command.process.send_signal(how)
                stopped = await command.end()
            await double.until_held(0)
            assert stopped.code == code, stopped.err
            psutil.wait_procs(left_of(tmp_path), timeout=10)
            assert not left_of(tmp_path)
        double.release.set()
        done = await run(tmp_path, *args, "SIGKILL", "--resume")
        assert done.code == 0, done.err
        assert len(lines(tmp_path / "SIGKILL")) == 3


@pytest.mark.long
async def test_a_killed_worker_and_tasks_that_are_others_now(tmp_path: Path) -> None:
    async with chat_double(lambda said, nth: str(number(said))) as double:
        double.is_held = lambda said: not double.release.is_set()
        args = counting(double, "-n", "3", "--output", "here")
        async with started(tmp_path, *args) as command:
            await double.until_held(3)
            router = psutil.Process(command.process.pid).children()[0]
            router.children()[0].kill()
            double.release.set()
            done = await command.end()
        assert done.code == 0, done.err
        assert (
            "envs.w0.0 was killed by SIGKILL: 3 of its rollouts run again, 0 failed"
            in done.out
        )
        results = tmp_path / "here" / "results.jsonl"
        kept = results.read_text().splitlines(keepends=True)[:2]
        results.write_text("".join(kept).replace('"task":"', '"task":"another '))
        changed = await run(tmp_path, *args, "--resume")
        assert changed.code == 1
        assert "the environment has changed; start again without --resume" in changed.err


@pytest.mark.long
async def test_the_latest_matching_is_resumed_and_failed_ones_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollway: Rollway
) -> None:
    monkeypatch.chdir(tmp_path)

    def broken_at_first(said: str, nth: int) -> str | web.Response:
        if number(said) == 1 and nth == 0:
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        return str(number(said))

    async with chat_double(broken_at_first) as double:
        none = rollway("eval", *counting(double, "-n", "3", "--resume"))
        assert (none.code, "to resume" in none.err) == (1, True)
        first = await run(tmp_path, *counting(double, "-n", "3"))
        assert first.code == 0, first.err
        assert value(first.out, "failed") == "1 of 3: 1 engine"
        assert "out of order" in first.out
        other = rollway("eval", *counting(double, "-n", "5", "--resume"))
        assert (other.code, "-n was 3, is 5" in other.err) == (1, True)
        second = await run(tmp_path, *counting(double, "-n", "3", "--resume"))
        assert second.code == 0, second.err
        assert value(second.out, "failed") == "none"
        assert double.num_asked == {"0?": 1, "1?": 2, "2?": 1}


async def test_all_failed_is_a_failure(tmp_path: Path) -> None:
    async with chat_double(even_ones) as double:
        done = await run(tmp_path, *counting(double, "-n", "3", kind="RaisingReward"))
        assert done.code == 1
        assert value(done.out, "failed") == "3 of 3: 3 scorer"
        assert "cannot judge" in done.out


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("-m", "nowhere"), 1, "no model folder 'nowhere'"),
        (("-m", "double", *NOWHERE, "--args", "[1]"), 1, "is not a JSON object"),
        (("-m", "double", *NOWHERE, "--tokens"), 1, "--tokens needs --tokenizer"),
        (("-m", "double", *NOWHERE, "--renderer", "qwen3"), 1, "are for --tokens"),
        (("-m", "double", *NOWHERE, "-n", "0"), 2, "-n"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollway: Rollway,
    args: tuple[str, ...], code: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    refused = rollway("eval", "reverse-text", *args)
    assert (refused.code, said in refused.err) == (code, True), refused.err
    assert code == 2 or refused.err.count("\n") == 1, refused.err
    assert not list(tmp_path.iterdir())


async def test_what_cannot_be_run_is_one_line(tmp_path: Path, tiny_moe: Path) -> None:
    async with chat_double(even_ones) as double:
        url = ("--engine-url", double.url, "--workers", "1")
        for args, said in (
            (("revers-text", "-m", "double", *url), "did you mean 'reverse-text'"),
            (("revers-text", "-m", str(tiny_moe)), "did you mean 'reverse-text'"),
            (("reverse-text", "-m", "doubl", *url), "no model 'doubl'"),
            (
                ("reverse-text", "-m", "double", *NOWHERE, "--workers", "1"),
                "nothing listens at",
            ),
            (("reverse-text", "-m", "double", *url, "--args", '{"lengt": 1}'), "lengt"),
        ):
            refused = await run(tmp_path, *args)
            assert refused.code == 1, (args, refused.err)
            assert said in refused.err
            assert refused.err.count("\n") == 1, refused.err


@pytest.mark.long
async def test_fewer_tasks_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text(
        "import rollway as rw\n"
        "class Few(rw.Environment):\n"
        "    def tasks(self):\n"
        "        return [rw.Task(id=str(n), prompt=f'{n}?', answer=str(n)) for n in range(3)]\n"
        "    @rw.reward\n"
        "    def right(self, task, rollout):\n"
        "        return float(rollout.last_text == task.answer)\n"
    )
    async with chat_double(lambda said, nth: str(number(said))) as double:
        done = await run(
            tmp_path, "few.py", "-m", "double", "--engine-url", double.url, "-n", "9"
        )
    assert done.code == 0, done.err
    assert "'few.py' has 3 tasks" in done.out
    assert "3 tasks × 1 rollouts, 3 settled" in done.out
