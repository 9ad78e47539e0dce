"""Steps for W&B and TensorBoard, which a process of their own passes on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from ..config.sections import MetricsConfig
from ..config.specs import SinksSpec
from ..errors import ConfigError, PartDied
from ..loop.processes import child
from ..observe.feed import SinksAnswer, SinksRefused
from ..rundir.rundir import RunDir
from .watch import RunWatch

FEED = "rollway.observe.feed:serve"
OPEN_DEADLINE_S = 120.0
GRACE_S = 60.0
"""How long the last steps may take to arrive once the run has ended."""
NEWS = b""

_answers: msgspec.msgpack.Decoder[SinksAnswer] = msgspec.msgpack.Decoder(SinksAnswer)


@asynccontextmanager
async def sinks(config: MetricsConfig, run: RunDir, watch: RunWatch) -> AsyncIterator[None]:
    """While the block lasts, every step goes to the sinks that the run wants; they get what is left
    when it ends. One that cannot be opened is said before anything slow begins; one that fails later
    is mentioned, and the run goes on."""
    names = [
        name for name, on in (("W&B", config.wandb_project), ("TensorBoard", config.tensorboard)) if on
    ]
    if not names:
        yield
        return
    log, who = run.logs / "sinks.log", " and ".join(names)
    async with child.start("sinks", FEED, log=log, grace_s=GRACE_S) as process:
        await _open(process, SinksSpec(config, str(run.path)), who, log)
        fresh = asyncio.Event()
        watch.on_step = fresh.set
        telling = asyncio.create_task(_tell(process, fresh))
        hearing = asyncio.create_task(_hear(process, watch, who, log))
        try:
            yield
        finally:
            has_died = hearing.done()
            telling.cancel()
            hearing.cancel()
    if await process.wait() and not has_died:
        watch.say(f"Warning: {who} may lack the last steps; see {log}")


async def _open(process: child.Child, part: SinksSpec, who: str, log: Path) -> None:
    try:
        async with asyncio.timeout(OPEN_DEADLINE_S):
            await process.pipe.send(msgspec.msgpack.encode(part))
            frame = await process.pipe.receive()
    except TimeoutError:
        raise ConfigError(f"{who} did not open within {OPEN_DEADLINE_S:g} s; see {log}") from None
    except ConnectionError:
        frame = None
    if frame is None:
        raise PartDied(f"the process for {who} died; see {log}")
    answer = _answers.decode(frame)
    if isinstance(answer, SinksRefused):
        raise ConfigError(f"{who} cannot be opened: {answer.error}")


async def _tell(process: child.Child, fresh: asyncio.Event) -> None:
    """That there are new lines; while the process is busy, one word stands for all that came."""
    with suppress(ConnectionError):
        while True:
            await fresh.wait()
            fresh.clear()
            await process.pipe.send(NEWS)


async def _hear(process: child.Child, watch: RunWatch, who: str, log: Path) -> None:
    """Nothing, unless it dies."""
    while await process.pipe.receive() is not None:
        pass
    watch.say(f"Warning: {who} will not hear of further steps, their process died; see {log}")
