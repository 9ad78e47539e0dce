"""The process that starts one vLLM server, watches it, and ends it with the run."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic

from ...config.sections import VllmConfig
from ...config.specs import VllmSpec
from ...errors import EngineError
from ...loop.processes import child
from ...loop.processes.part import Parent, describe_death, run_part, unchanged
from ...loop.processes.scratch import scratch_folder
from ...model.shape import read_shape
from ..engines.control import open_api
from ..engines.link import EngineAccess, EngineApi
from .command import HOST, VllmCommand, check_gpus, find_gpus, make_command

BECOME = f"{__name__}:become_vllm"
ASK_EVERY_S = 0.5
LOOK_EVERY_S = 2.0
ANSWER_S = 5.0
HUNG_AFTER_S = 60.0
"""A vLLM server that has not answered for this long is ended, and started again by the run."""
GONE_AFTER_S = 10.0
"""The same for one that does not even listen any more: it was told to end, and does not manage to."""
END_S = 4.0
"""How long vLLM may take to end by itself, before it is killed."""
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
PACKAGE = Path(__file__).parents[2]
PREFIX = "rollway-vllm-"


async def vllm_server(spec: VllmSpec, parent: Parent) -> None:
    """Run vLLM until the parent ends this process. Fail if vLLM ends before, or stops answering."""
    with _plugin_folder() as folder:
        command = _command(spec, folder)
        access = EngineAccess(f"http://{HOST}:{spec.port}", ANSWER_S)
        async with (
            _start(command, spec) as process,
            open_api(access) as api,
            asyncio.TaskGroup() as tasks,
        ):
            running = [
                tasks.create_task(_fail_when_ended(process)),
                tasks.create_task(_watch(api, spec.port, parent)),
            ]
            await parent.wait_until_gone()
            for task in running:
                task.cancel()


def _command(spec: VllmSpec, plugin_folder: Path) -> VllmCommand:
    config = spec.engine.vllm or VllmConfig()
    found = len(list(GPU_FOLDER.iterdir())) if GPU_FOLDER.exists() else 0
    gpus = find_gpus(config, os.environ.get("CUDA_VISIBLE_DEVICES"), found)
    check_gpus(config, gpus)
    shape, routes = read_shape(spec.model.path), spec.engine.routes
    wants_routes = routes if routes is not None else bool(shape and shape.has_experts)
    command = make_command(spec, gpus, wants_routes=wants_routes)
    inherited = command.env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    paths = [str(plugin_folder), *filter(None, [inherited])]
    command.env["PYTHONPATH"] = os.pathsep.join(paths)
    return command


@contextmanager
def _plugin_folder() -> Iterator[Path]:
    """Give a folder with nothing but a link to this package. vLLM may run in a venv without rollway, and
    must not see the other packages of this one."""
    with scratch_folder(PREFIX) as folder:
        (folder / PACKAGE.name).symlink_to(PACKAGE)
        yield folder


@asynccontextmanager
async def _start(command: VllmCommand, spec: VllmSpec) -> AsyncIterator[child.Child]:
    log = Path(spec.log) if spec.log else None
    starting = child.start("vllm", BECOME, log=log, grace_s=END_S, computes=command.on_cpu)
    async with starting as process:
        await process.send_spec(command)
        try:
            yield process
        finally:
            process.terminate()


async def _fail_when_ended(process: child.Child) -> None:
    code = await process.wait()
    raise EngineError(f"vLLM (pid {process.pid}) {describe_death(process, code)}")


async def _watch(api: EngineApi, port: int, parent: Parent) -> None:
    """Report when vLLM answers for the first time. Fail if it then falls silent."""
    while not await _answers(api):  # noqa: ASYNC110, a server that starts can only be asked
        await asyncio.sleep(ASK_EVERY_S)
    await parent.report_ready(api.url)
    heard_s = monotonic()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if await _answers(api):
            heard_s = monotonic()
            continue
        patience_s = HUNG_AFTER_S if await _listens(port) else GONE_AFTER_S
        if monotonic() - heard_s > patience_s:
            raise EngineError(f"vLLM at {api.url} has not answered for {patience_s:g} s")


async def _listens(port: int) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(HOST, port)
    except TimeoutError:
        return True  # its queue of new connections is full
    except OSError:
        return False
    writer.close()
    return True


async def _answers(api: EngineApi) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await api.is_healthy()
    except TimeoutError:
        return False


def become_vllm(name: str, sock: socket.socket) -> None:
    """Replace this process by vLLM. It ends when its parent does, and a guard then ends what vLLM has
    started: its engine does not notice that the server is gone."""
    _, command = child.receive_spec(sock, VllmCommand)
    sock.set_inheritable(False)
    if os.fork() == 0:
        while sock.recv(1):
            pass
        os.killpg(0, signal.SIGKILL)
    os.environ.update(command.env)
    os.execvp(command.argv[0], command.argv)


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, VllmSpec, unchanged, vllm_server)
