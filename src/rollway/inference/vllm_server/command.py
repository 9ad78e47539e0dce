"""The command and the environment that start vLLM so that it can be trained on."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from ...config.sections import VllmConfig
from ...config.specs import VllmSpec
from ...errors import ConfigError
from ..engines.facts import EXTENSION, MIDDLEWARE, SAMPLED_LOGPROBS

HOST = "127.0.0.1"
OURS = ("--host", "--port", "--uds", "--api-key", "--served-model-name")
"""Arguments of vLLM by which the run finds it."""
CPU_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""On a CPU vLLM shares the cores with the rest of the run. Its default binds each thread to a core and
takes most of the memory; two threads on two busy cores are many times slower than one."""


def find_program(command: str) -> str:
    """Return the path of vLLM's program: of this venv, or on the PATH."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(command, path=beside) or shutil.which(command)
    if found is None:
        raise ConfigError(
            f"'engine.vllm.command' = '{command}' is not a program on this machine: pip install vllm, "
            "here or in a venv of its own, and set the key to its bin/vllm"
        )
    return str(Path(found).absolute())


class VllmCommand(Struct, frozen=True):
    argv: tuple[str, ...]
    env: dict[str, str]
    """What is added to the environment of this process."""
    on_cpu: bool


def find_gpus(config: VllmConfig, visible: str | None, found: int) -> tuple[str, ...]:
    """Return the GPUs to use: those of the run file, of CUDA_VISIBLE_DEVICES, or all that are there."""
    if config.gpus is not None:
        return tuple(str(gpu) for gpu in config.gpus)
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return tuple(name for name in names if name not in ("", "-1"))
    return tuple(str(gpu) for gpu in range(found))


def check_gpus(config: VllmConfig, gpus: Sequence[str]) -> None:
    """Raise ConfigError if the GPUs do not suffice for all replicas."""
    needed = config.replicas * config.gpus_a_replica
    if len(set(gpus)) < len(gpus):
        raise ConfigError(f"'engine.vllm.gpus' names a GPU twice: {', '.join(gpus)}")
    if not gpus and config.gpus_a_replica > 1:
        raise ConfigError(
            f"'engine.vllm.gpus_a_replica' is {config.gpus_a_replica}, but no GPU was found: name "
            "the GPUs in 'engine.vllm.gpus'"
        )
    if gpus and needed > len(gpus):
        raise ConfigError(
            f"'engine.vllm' asks for {config.replicas} × {config.gpus_a_replica} GPUs, and there are "
            f"{len(gpus)} ({', '.join(gpus)}): lower 'replicas' or 'gpus_a_replica', or name more 'gpus'"
        )


def check_startable(config: VllmConfig) -> None:
    """Raise ConfigError if vLLM is not installed, or gets arguments by which the run would lose it."""
    find_program(config.command)
    for arg in config.args:
        if arg.partition("=")[0] in OURS:
            raise ConfigError(
                f"'engine.vllm.args' has {arg}, which rollway sets itself: remove it "
                "('engine.vllm.port' chooses the port)"
            )


def make_command(spec: VllmSpec, gpus: Sequence[str], *, wants_routes: bool) -> VllmCommand:
    """Return how to start one replica. What the run file adds comes last, so that it wins."""
    config = spec.engine.vllm or VllmConfig()
    check_startable(config)
    folder, size = spec.model.path, config.gpus_a_replica
    own = gpus[spec.replica * size : (spec.replica + 1) * size]
    dtype = config.dtype or ("bfloat16" if gpus else "float32")
    argv = [
        find_program(config.command), "serve", folder,
        "--served-model-name", Path(folder).name,
        "--host", HOST, "--port", str(spec.port),
        "--dtype", dtype, "--seed", str(spec.seed + spec.replica),
        "--generation-config", "vllm",
        "--logprobs-mode", SAMPLED_LOGPROBS,
        "--worker-extension-cls", EXTENSION,
        "--middleware", MIDDLEWARE, "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if spec.engine.max_context:
        argv += ["--max-model-len", str(spec.engine.max_context)]
    if wants_routes:
        argv.append("--enable-return-routed-experts")
    if spec.model.trust_remote_code:
        argv.append("--trust-remote-code")
    if gpus:
        argv += ["--tensor-parallel-size", str(size)]
    else:
        argv.append(
            "--enforce-eager"
        )  # compiled on CPU, vLLM returns routes that are all zero
    env = make_env(config, own)
    return VllmCommand((*argv, *config.args), env, on_cpu=not gpus)


def make_env(config: VllmConfig, gpus: Sequence[str]) -> dict[str, str]:
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": "",  # rollway's plug-in demands the key of the run
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        **({} if gpus else CPU_ENV),
        **config.env,
    }
