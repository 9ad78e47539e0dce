"""Commands of the documentation run as printed, in a folder that holds what they name.

Evaluations run with few rollouts against servers that answer by what they are asked. Training that takes
minutes or needs an external engine is a dry run. Short trainings run with stand-ins for the engine and
the trainer.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import Struct
from tests.docs.pages import ROOT, Line, blocks, commands
from tests.doubles.chat import chat_double
from tests.doubles.command import Rollway
from tests.doubles.engine import engine_double
from tests.doubles.shared import build_once
from tests.doubles.stand_ins import copying_trainer, drawing_engines
from tests.doubles.workspace import DEADLINE_S, ENVS, Workspace

from rollway.config.load import load
from rollway.warmup.build import warmup_spec
from rollway.warmup.recipe import RECIPE, recipe

pytestmark = [pytest.mark.anyio, pytest.mark.system]

UNTIL_STOPPED = {"serve", "engine"}
"""Commands that end only by Ctrl-C. Tests in tests/system start them."""
NEEDS_ENGINE = {"doctor"}
"""Commands that need a real engine. Tests in tests/system give them one."""
FEWER = {"train": ["--dry-run"], "eval": ["-n", "2", "-r", "2", "--max-tokens", "8"],
         "simulate": ["--rollouts", "2000"]}  # fmt: skip
"""Options added so that a command takes seconds."""
MODEL_FOLDERS = ("outputs/models/reverse-text-moe", "outputs/sort/weights/step_150")
"""Evaluations of these use a server: tests/system/test_eval.py evaluates a model folder."""
OTHER_WAYS = {"--resume", "--clean", "--dry-run"}
STOPPED_AFTER, STEPS = 2, 8
"""Steps: the run is stopped after the first number, when rollout g4.2 has settled, of the second."""


def is_short_training(line: Line) -> bool:
    return line.args[:2] == ["train", "run.toml"] and "engine.external.url" not in " ".join(
        line.args
    )


def command_lines() -> list[Line]:
    """Every command once; those that make what others use come first."""
    found: dict[tuple[str, ...], Line] = {}
    for line in commands():
        if line.program == "tail" or (
            line.program == "rollway" and line.args[0] not in UNTIL_STOPPED | NEEDS_ENGINE
        ):
            found.setdefault(tuple(line.args), line)
    return list(found.values())


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path) -> Path:
    """The folder of a reader: run files, environments, models, and a run that was stopped."""
    return build_once(
        tmp_path_factory, "reader", lambda folder: fill_folder(folder, tiny_moe)
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, stopped: Path) -> Path:
    """A copy, which commands may change."""
    return shutil.copytree(stopped, tmp_path_factory.mktemp("copy") / "reader")


def fill_folder(folder: Path, tiny_moe: Path) -> None:
    with drawing_engines(tiny_moe) as (engine,), copying_trainer(tiny_moe) as trainer:
        work = Workspace(folder, tiny_moe, engines=[engine.url], trainer=trainer)
        fill_with(work, tiny_moe, stand_ins(engine.url))


def fill_with(work: Workspace, tiny_moe: Path, instead: list[str]) -> None:
    folder = work.folder
    (run_file,) = [
        block.text for block in blocks("toml") if block.text.startswith("# run.toml\n")
    ]
    env = 'args = { kind = "Lengths" }\nid = "reverse-text.py"'  # where random weights earn something
    work.file.write_text(run_file.replace('id = "reverse-text"', env))
    shutil.copy(ENVS, folder / "reverse-text.py")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (block,) = re.findall(
        r"```python\n(# sort_letters.py.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    (folder / "sort_letters.py").write_text(block)
    built = folder / "outputs" / "models" / "reverse-text-moe"
    shutil.copytree(tiny_moe, built)
    demo = warmup_spec(load(ROOT / "examples" / "reverse-text" / "run.toml"))
    assert demo is not None
    (built / RECIPE).write_bytes(recipe(demo))
    try:
        with work.training(*first_training().args[2:], *instead) as process:
            work.wait_for_step(process, STOPPED_AFTER)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=DEADLINE_S)
    finally:
        work.kill()


def first_training() -> Line:
    """The command that makes the folder's run, with the most options that a printed one has."""
    lines = [
        line
        for line in command_lines()
        if is_short_training(line) and not OTHER_WAYS & {*line.args}
    ]
    return max(lines, key=lambda line: len(line.args))


class Servers(Struct, frozen=True):
    """Real servers and folders for the addresses and models that the documentation names."""

    names: dict[str, list[str]]

    def words(self, args: list[str]) -> list[str]:
        return [new for word in args for new in self.names.get(word, [word])]


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[Servers]:
    async with (
        chat_double(lambda said, before: "abc", models=("gpt-x", "MODEL")) as chat,
        engine_double(model, lambda said: "abc") as engine,
    ):
        at_chat = ["MODEL", "--engine-url", chat.url]
        yield Servers({
            "https://api.example.com/v1": [chat.url],
            "http://localhost:8000/v1": [chat.url],
            "http://localhost:8000": [engine.url],
            "Qwen/Qwen3-8B": ["scripted"],
            "models/Qwen3-8B": [str(model)],
            **dict.fromkeys(MODEL_FOLDERS, at_chat),
        })  # fmt: skip


def label(line: Line) -> str:
    return " ".join(line.args[:4])


def lines_of(*programs: str) -> list[Line]:
    return [line for line in command_lines() if line.args[0] in programs]


@pytest.mark.parametrize("line", lines_of("eval"), ids=label)
async def test_an_evaluation_does_what_it_says(
    line: Line, folder: Path, tiny_moe: Path
) -> None:
    async with served(tiny_moe) as servers:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollway", *servers.words(line.args), *FEWER["eval"], cwd=folder,
            env={**os.environ, "OPENAI_API_KEY": "sesame"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    assert out.strip()


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in command_lines()
        if line.args[0] != "eval"
        and (not is_short_training(line) or "--dry-run" in line.args)
    ],
    ids=label,
)
def test_a_command_does_what_it_says(
    line: Line, folder: Path, rollway: Rollway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if line.program != "rollway":
        subprocess.run([line.program, *line.args], check=True, stdout=subprocess.DEVNULL)
        return
    more = [] if is_short_training(line) else FEWER.get(line.args[0], [])
    done = rollway(*line.args, *more)
    assert done.code == 0, done.err
    assert done.out.strip()


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in command_lines()
        if is_short_training(line) and {"--resume", "--clean"} & {*line.args}
    ],
    ids=lambda line: " ".join(line.args),
)
def test_a_stopped_run_is_resumed_or_started_over(
    line: Line, stopped: Path, tmp_path: Path, tiny_moe: Path
) -> None:
    reader = shutil.copytree(stopped, tmp_path / "reader")
    with drawing_engines(tiny_moe) as (engine,), copying_trainer(tiny_moe) as trainer:
        work = Workspace(reader, tiny_moe, engines=[engine.url], trainer=trainer)
        shutil.copy(stopped / work.file.name, work.file)
        done = work.train(*line.args[2:], *stand_ins(engine.url))
        assert done.returncode == 0, done.stderr
    metrics = (reader / "outputs" / "my-run" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == STEPS


def stand_ins(url: str) -> list[str]:
    overrides = [
        f"engine.external.url={url}",
        "engine.routes=false",
        "engine.verify=false",
        "external_trainer={}",
    ]
    return [word for override in overrides for word in ("--set", override)]
