"""Commands of the documentation run as printed, in a folder that holds what they name.

Evaluations run with few rollouts against servers that answer by what they are asked. Training that takes
minutes or needs an external engine is a dry run. Everything else runs as it is.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import Struct
from tests.docs.pages import ROOT, Line, blocks, commands
from tests.doubles.chat import chat_double
from tests.doubles.engine import engine_double
from tests.doubles.workspace import ENVS, Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(180)]

UNTIL_STOPPED = {"serve", "engine"}
"""Commands that end only by Ctrl-C. Tests in tests/system start them."""
FEWER = {"train": ["--dry-run"], "eval": ["-n", "2", "-r", "2", "--max-tokens", "8"],
         "simulate": ["--rollouts", "2000"]}  # fmt: skip
"""Options added so that a command takes seconds."""
STOPPED_AFTER, STEPS = 2, 8
"""Steps: the run is stopped after the first number, when rollout g4.2 has settled, of the second."""


def is_short_training(line: Line) -> bool:
    return line.args[:2] == ["train", "run.toml"] and "engine.external.url" not in " ".join(line.args)


def command_lines() -> list[Line]:
    """Every command once; those that make what others use come first."""
    found: dict[tuple[str, ...], Line] = {}
    for line in commands():
        if line.program == "tail" or (line.program == "rollway" and line.args[0] not in UNTIL_STOPPED):
            found.setdefault(tuple(line.args), line)
    return list(found.values())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path) -> Iterator[Path]:
    """The folder of a reader: run files, environments, models, and a run that was stopped."""
    folder = tmp_path_factory.mktemp("reader")
    work = Workspace(folder, tiny_moe)
    (run_file,) = [block.text for block in blocks("toml") if block.text.startswith("# run.toml\n")]
    env = 'args = { kind = "Lengths" }\nid = "reverse-text.py"'  # where random weights earn something
    work.file.write_text(run_file.replace('id = "reverse-text"', env))
    shutil.copy(ENVS, folder / "reverse-text.py")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (block,) = re.findall(
        r"```python\n(# sort_letters.py.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    (folder / "sort_letters.py").write_text(block)
    for model in ("models/reverse-text-moe", "sort/weights/step_150"):
        shutil.copytree(tiny_moe, folder / "outputs" / model)
    with work.training() as process:
        work.wait_for_step(process, STOPPED_AFTER)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    yield folder
    for process in work.processes():
        process.kill()


class Servers(Struct, frozen=True):
    """Real servers and folders for the addresses and models that the documentation names."""

    names: dict[str, str]

    def words(self, args: list[str]) -> list[str]:
        return [self.names.get(word, word) for word in args]


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[Servers]:
    async with (
        chat_double(lambda said, before: "abc", models=("gpt-x", "MODEL")) as chat,
        engine_double(model, lambda said: "abc") as engine,
    ):
        yield Servers({
            "https://api.example.com/v1": chat.url,
            "http://localhost:8000/v1": chat.url,
            "http://localhost:8000": engine.url,
            "Qwen/Qwen3-8B": "scripted",
            "models/Qwen3-8B": str(model),
        })  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [line for line in command_lines() if not is_short_training(line)],
    ids=lambda line: " ".join(line.args[:4]),
)
async def test_a_command_does_what_it_says(line: Line, folder: Path, tiny_moe: Path) -> None:
    async with served(tiny_moe) as servers:
        out = await run_command(
            line.program, [*servers.words(line.args), *FEWER.get(line.args[0], [])], folder
        )
    assert out.strip() or line.program != "rollway"


@pytest.mark.parametrize(
    "line",
    [line for line in command_lines() if is_short_training(line) and len(line.args) > 2],
    ids=lambda line: " ".join(line.args),
)
async def test_training_as_printed(line: Line, folder: Path, tmp_path: Path) -> None:
    """Each command runs in a copy of the folder, with the stopped run if the command needs one.
    The plain command made that folder."""
    reader = shutil.copytree(folder, tmp_path / "reader")
    run = reader / "outputs" / "my-run"
    if not {"--resume", "--clean"} & {*line.args}:
        shutil.rmtree(run)
    await run_command(line.program, line.args, reader)
    if "--dry-run" not in line.args:
        assert len((run / "metrics.jsonl").read_text().splitlines()) == STEPS


async def run_command(program: str, args: list[str], folder: Path) -> str:
    """Return what a command printed. Fails if the command does."""
    command = [sys.executable, "-m", "rollway"] if program == "rollway" else [program]
    process = await asyncio.create_subprocess_exec(
        *command, *args, cwd=folder, env={**os.environ, "OPENAI_API_KEY": "sesame"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()
