"""An env server of rollway's for a bench, and a client of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from loopback.report import QUIET
from rollway.config.sections import EngineConfig, EnvConfig, ModelConfig, PayloadConfig
from rollway.config.specs import RouterSpec, WatchSpec
from rollway.envserver import client as envs
from rollway.loop.processes.part import start_part
from rollway.wire.messages import ServerStats

ROUTER = "rollway.envserver.router.router:main"
LOG = "router.log"


class Server:
    """A server whose workers are all up."""

    def __init__(self, client: envs.EnvClient, address: str, pid: int) -> None:
        self.client = client
        self.address = address
        self.pid = pid


@asynccontextmanager
async def env_server(
    env: EnvConfig, url: str, folder: Path, watch: WatchSpec = QUIET
) -> AsyncIterator[Server]:
    part = RouterSpec(
        env=env,
        model=ModelConfig(
            path=str(folder), renderer="qwen3", template={"enable_thinking": False}
        ),
        engine=EngineConfig(request_deadline_s=600, routes=True),
        engine_urls=(url,),
        payload=PayloadConfig(),
        payload_dir=str(folder),
        log_dir=str(folder),
        seed=0,
        watch=watch,
    )
    async with start_part("bench.router", ROUTER, part, log=folder / LOG) as router:
        listening = asyncio.ensure_future(
            router.listen(lambda stats: None, lambda body: None)
        )
        address = await router.ready()
        async with envs.connect(address) as client:
            up: set[str] = set()
            while len(up) < env.local.workers:
                match await client.receive():
                    case ServerStats(stats=stats) if ".w" in stats.process:
                        up.add(stats.process)
            yield Server(client, address, router.pid)
        listening.cancel()
