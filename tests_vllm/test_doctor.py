"""`rollway doctor` is green on the right setup, and says what is wrong with others."""

import subprocess
import sys
from pathlib import Path

from tests_vllm.servers import EAGER, FLOAT32, ROUTES, Server, serving


def doctor(server: Server, *options: object) -> tuple[int, str]:
    argv = [
        sys.executable,
        "-m",
        "rollway",
        "doctor",
        "--engine-url",
        server.url,
        *map(str, options),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_the_right_setup_is_green(right_moe: Server, moe: Path) -> None:
    code, text = doctor(right_moe, "--model", moe, "--intrusive")
    assert code == 0, text
    assert "WRONG" not in text
    for subject in ("tokens", "logprobs", "routes", "context", "weights", "new weights", "prefix cache",
                    "binary replies", "LoRA", "pause", "reload"):  # fmt: skip
        assert f"ok    {subject}: " in text, text


def test_a_server_without_the_plugin(moe: Path, folder: Path) -> None:
    with serving(moe, folder / "doctor.log", *EAGER, *FLOAT32, *ROUTES) as server:
        code, text = doctor(server, "--model", moe)
        assert code == 1, text
        assert "WRONG logprobs" in text
        assert "--logprobs-mode processed_logprobs" in text
        assert "WRONG new weights" in text
        assert "note  binary replies" in text
