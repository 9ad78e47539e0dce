"""Commands of the documentation, carried out as printed, in a folder that has what they speak of.

Evaluations are carried out with few rollouts against servers that answer by what is asked, training
that takes minutes or needs an engine of its own as a dry run, everything else as it stands.
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
"""Commands that end by Ctrl-C only; tests/system starts them."""
FEWER = {"train": ["--dry-run"], "eval": ["-n", "2", "-r", "2", "--max-tokens", "8"],
         "simulate": ["--rollouts", "2000"]}  # fmt: skip
"""What is added, so that a command takes seconds."""
STOPPED_AFTER, STEPS = 2, 8
"""Steps: so many, and rollout g4.2 has ended; and as many as the run file wants."""


def is_short_training(line: Line) -> bool:
    return line.args[:2] == ["train", "run.toml"] and "engine.url" not in " ".join(line.args)


def command_lines() -> list[Line]:
    """Each once, those that make what others use first."""
    found: dict[tuple[str, ...], Line] = {}
    for line in commands():
        if line.program == "tail" or (line.program == "rollway" and line.args[0] not in UNTIL_STOPPED):
            found.setdefault(tuple(line.args), line)
    return list(found.values())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path) -> Iterator[Path]:
    """Where a reader would be: run files, environments, models, and a run that was stopped."""
    folder = tmp_path_factory.mktemp("reader")
    work = Workspace(folder, tiny_moe)
    (run_file,) = [one.text for one in blocks("toml") if one.text.startswith("# run.toml\n")]
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
    """What stands where the documentation has an address or a model."""

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
        out = await carried_out(
            line.program, [*servers.words(line.args), *FEWER.get(line.args[0], [])], folder
        )
    assert out.strip() or line.program != "rollway"


@pytest.mark.parametrize(
    "line",
    [line for line in command_lines() if is_short_training(line) and len(line.args) > 2],
    ids=lambda line: " ".join(line.args),
)
async def test_training_as_printed(line: Line, folder: Path, tmp_path: Path) -> None:
    """Each in a folder of its own, where a run was stopped if the command speaks of one. The plain
    command is what `folder` comes from."""
    reader = shutil.copytree(folder, tmp_path / "reader")
    run = reader / "outputs" / "my-run"
    if not {"--resume", "--clean"} & {*line.args}:
        shutil.rmtree(run)
    await carried_out(line.program, line.args, reader)
    if "--dry-run" not in line.args:
        assert len((run / "metrics.jsonl").read_text().splitlines()) == STEPS


async def carried_out(program: str, args: list[str], folder: Path) -> str:
    """What it printed; fails if it ends with an error."""
    command = [sys.executable, "-m", "rollway"] if program == "rollway" else [program]
    process = await asyncio.create_subprocess_exec(
        *command, *args, cwd=folder, env={**os.environ, "OPENAI_API_KEY": "sesame"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()
