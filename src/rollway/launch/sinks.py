"""Runs the process that passes a run's steps on to W&B and TensorBoard."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from ..config.sections import MetricsConfig
from ..config.specs import SinksSpec
from ..errors import ConfigError, PartDied
from ..loop.processes import child
from ..observe.feed import SinksAnswer
from ..rundir.rundir import RunDir
from .watch import RunWatch

FEED = "rollway.observe.feed:serve"
OPEN_DEADLINE_S = 120.0
GRACE_S = 60.0
"""How long the last steps may take to arrive once the run has ended."""
NEW_LINES = b""
"""The frame that says that the metrics files have new lines."""


@asynccontextmanager
async def feed_sinks(
    config: MetricsConfig, run: RunDir, watch: RunWatch
) -> AsyncIterator[None]:
    """Send every step to the sinks that the run file names, while the block lasts.

    A sink that cannot be opened is an error before anything slow begins. A sink that fails later is a
    warning, and the run continues.
    """
    is_wanted = {"W&B": config.wandb_project, "TensorBoard": config.tensorboard}
    title = " and ".join(name for name in is_wanted if is_wanted[name])
    if not title:
        yield
        return
    log = run.logs / "sinks.log"
    async with child.start("sinks", FEED, log=log, grace_s=GRACE_S) as process:
        await _open(process, SinksSpec(config, str(run.path)), title, log)
        has_new_lines = asyncio.Event()
        watch.on_step = has_new_lines.set
        notifying = asyncio.create_task(_notify(process, has_new_lines))
        dying = asyncio.create_task(_warn_of_death(process, watch, title, log))
        try:
            yield
        finally:
            has_died = dying.done()
            notifying.cancel()
            dying.cancel()
    if await process.wait() and not has_died:
        watch.say(f"Warning: {title} may lack the last steps; see {log}")


async def _open(process: child.Child, spec: SinksSpec, title: str, log: Path) -> None:
    """Give the process its spec, and wait until it has opened all sinks."""
    try:
        async with asyncio.timeout(OPEN_DEADLINE_S):
            await process.send_spec(spec)
            frame = await process.pipe.receive()
    except TimeoutError:
        raise ConfigError(
            f"{title} did not open within {OPEN_DEADLINE_S:g} s; see {log}"
        ) from None
    if frame is None:
        raise PartDied(f"the process for {title} died; see {log}")
    answer = msgspec.msgpack.decode(frame, type=SinksAnswer)
    if answer.error:
        raise ConfigError(f"{title} cannot be opened: {answer.error}")


async def _notify(process: child.Child, has_new_lines: asyncio.Event) -> None:
    """Tell the process about new lines. While it is busy, one frame stands for all that came."""
    with suppress(ConnectionError):
        while True:
            await has_new_lines.wait()
            has_new_lines.clear()
            await process.pipe.send(NEW_LINES)


async def _warn_of_death(
    process: child.Child, watch: RunWatch, title: str, log: Path
) -> None:
    """Print a warning if the process dies; it sends nothing otherwise."""
    while await process.pipe.receive() is not None:
        pass
    watch.say(
        f"Warning: {title} will not get further steps, because their process died; see {log}. "
        "--resume sends them what they lack"
    )
