"""The command that starts vLLM has the flags for the machine and the model."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rollway.config.sections import EngineConfig, ModelConfig, VllmConfig
from rollway.config.specs import VllmSpec, WatchSpec
from rollway.errors import ConfigError
from rollway.inference.vllm_server.command import (
    VllmCommand,
    check_gpus,
    find_gpus,
    find_program,
    make_command,
)

PROGRAM = sys.executable
"""Any program: nothing is started here."""


def made(
    *gpus: str, replica: int = 0, wants_routes: bool = False, max_context: int | None = None,
    **keys: Any,
) -> VllmCommand:  # fmt: skip
    engine = EngineConfig(max_context=max_context, vllm=VllmConfig(command=PROGRAM, **keys))
    model = ModelConfig("models/policy")
    spec = VllmSpec(model, engine, replica, 8000, 0, "engine.log", WatchSpec())
    return make_command(spec, gpus, wants_routes=wants_routes)


def after(command: VllmCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_on_a_cpu() -> None:
    command = made(wants_routes=True, max_context=512)
    assert command.argv[1:3] == ("serve", "models/policy")
    assert {"--enforce-eager", "--enable-return-routed-experts"} <= {*command.argv}
    assert after(command, "--dtype") == "float32"
    assert after(command, "--max-model-len") == "512"
    assert after(command, "--served-model-name") == "policy"
    assert after(command, "--host") == "127.0.0.1"
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert command.env["CUDA_VISIBLE_DEVICES"] == "", "GPUs that are not used are hidden"
    assert command.on_cpu


def test_replicas_share_the_gpus() -> None:
    commands = [made(*"0123", replica=n, replicas=2, gpus_a_replica=2) for n in range(2)]
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in commands] == ["0,1", "2,3"]
    for command in commands:
        assert after(command, "--tensor-parallel-size") == "2"
        assert after(command, "--dtype") == "bfloat16"
        assert "--enforce-eager" not in command.argv
        assert "--enable-return-routed-experts" not in command.argv


def test_the_run_file_has_the_last_word() -> None:
    command = made(
        dtype="bfloat16", args=("--dtype", "float16"), env={"OMP_NUM_THREADS": "8"}
    )
    assert command.argv[-2:] == ("--dtype", "float16")
    assert command.env["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(
    ("keys", "visible", "found", "gpus"),
    [
        ({}, None, 0, ()),
        ({}, None, 2, ("0", "1")),
        ({}, "3,5", 8, ("3", "5")),
        ({}, "", 8, ()),
        ({}, "-1", 8, ()),
        ({"gpus": (4, 6)}, "3,5", 8, ("4", "6")),
    ],
)
def test_which_gpus_are_used(
    keys: dict[str, Any], visible: str | None, found: int, gpus: tuple[str, ...]
) -> None:
    assert find_gpus(VllmConfig(**keys), visible, found) == gpus


def test_too_few_gpus_are_said() -> None:
    with pytest.raises(ConfigError, match="2 × 2 GPUs, and there are 3"):
        check_gpus(VllmConfig(replicas=2, gpus_a_replica=2), ("0", "1", "2"))
    with pytest.raises(ConfigError, match="names a GPU twice"):
        check_gpus(VllmConfig(), ("0", "0"))
    with pytest.raises(ConfigError, match="no GPU was found"):
        check_gpus(VllmConfig(gpus_a_replica=2), ())


@pytest.mark.parametrize("arg", ["--port", "--port=8000", "--uds", "--api-key"])
def test_arguments_by_which_the_run_would_lose_vllm_are_refused(arg: str) -> None:
    with pytest.raises(ConfigError, match=f"has {arg}, which rollway sets itself"):
        made(args=(arg, "8000"))


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="pip install vllm"):
        find_program("no-such-vllm")
    assert Path(find_program("python")).exists()
