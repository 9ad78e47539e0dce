"""Builds the model of a run that has a [warmup] section and no model yet."""

from msgspec import msgpack

from ..config.sections import RunConfig
from ..config.specs import WarmupSpec, watch_spec
from ..errors import ModelError, PartDied
from ..loop.processes import child
from ..loop.processes.part import last_log_lines
from ..observe.console import Screen
from ..rundir.rundir import RunDir
from .recipe import WarmupEnded, WarmupMessage, WarmupProgress

LINE_EVERY = 50
"""Every this many steps the progress stays on the screen as a line; in between it is the status line."""

_messages: msgpack.Decoder[WarmupMessage] = msgpack.Decoder(WarmupMessage)


def warmup_spec(config: RunConfig) -> WarmupSpec | None:
    """Return what the warm-up's process needs; None if the run file has no [warmup] section."""
    if config.warmup is None:
        return None
    return WarmupSpec(
        warmup=config.warmup,
        model=config.model,
        env=config.env[0],
        max_context=config.engine.embedded_context,
        seed=config.seed,
        watch=watch_spec(config.watch),
    )


async def build_model(spec: WarmupSpec, run: RunDir, screen: Screen) -> None:
    goal = spec.warmup.solve_rate
    screen.line(
        f"Warm-up: building a small model at {spec.model.path} and teaching it answers of "
        f"'{spec.env.id}' until it solves {goal:.0%} of the tasks"
    )
    log = run.logs / "warmup.log"
    async with child.start("warmup", "rollway.warmup.imitate:main", log=log) as process:
        await process.send_spec(spec)
        while (frame := await process.pipe.receive()) is not None:
            match _messages.decode(frame):
                case WarmupProgress(step=step, loss=loss, solve_rate=solve_rate):
                    text = f"Warm-up step {step} | Loss: {loss:.3f} | Solve rate: {solve_rate:.3f}"
                    if step % LINE_EVERY == 0 or solve_rate >= goal:
                        screen.line(text)
                    else:
                        screen.status(text)
                case WarmupEnded(error=""):
                    return
                case WarmupEnded(error=error):
                    raise ModelError(error)
        raise PartDied(f"the warm-up died{last_log_lines(log)}")
