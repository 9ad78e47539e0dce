"""`rollway doctor` examines a real engine."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.doubles.parts import ENGINE, serving_part
from tests.doubles.workspace import DEADLINE_S
from tests.inference.test_embedded import make_spec

pytestmark = [pytest.mark.anyio, pytest.mark.system]


async def doctor(*args: object) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollway", "doctor", *map(str, args),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


@pytest.mark.long
async def test_a_right_engine_and_one_with_other_weights(
    tiny_moe: Path, tiny_dense: Path
) -> None:
    async with serving_part("engine", ENGINE, make_spec(tiny_moe)) as (_, url):
        code, text = await doctor("--engine-url", url, "--model", tiny_moe, "--intrusive")
        assert code == 0, text
        for subject in (
            "engine",
            "tokens",
            "logprobs",
            "routes",
            "context",
            "weights",
            "pause",
        ):
            assert f"ok    {subject}: " in text
        code, text = await doctor("--engine-url", url, "--model", tiny_dense)
        assert code == 1, text
        assert "WRONG weights: " in text


async def test_no_engine() -> None:
    code, text = await doctor("--engine-url", "http://127.0.0.1:9")
    assert code == 1
    assert "no engine at http://127.0.0.1:9" in text
