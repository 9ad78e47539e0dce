"""Builds the model of a run that has a [warmup] section and no model yet."""

import msgspec

from ..config.sections import RunConfig
from ..config.specs import WarmupSpec, watch_spec
from ..errors import ModelError, PartDied
from ..loop.processes import child
from ..loop.processes.part import last_words_in
from ..observe.console import Screen
from ..rundir.rundir import RunDir
from .recipe import WarmupEnded, WarmupMessage, WarmupProgress

_said: msgspec.msgpack.Decoder[WarmupMessage] = msgspec.msgpack.Decoder(WarmupMessage)


def warmup_spec(config: RunConfig) -> WarmupSpec | None:
    if config.warmup is None:
        return None
    return WarmupSpec(
        warmup=config.warmup,
        model=config.model,
        env=config.env[0],
        max_context=config.engine.max_context,
        seed=config.seed,
        watch=watch_spec(config.watch),
    )


async def build_model(part: WarmupSpec, run: RunDir, screen: Screen) -> None:
    """Run the warm-up in a process of its own, showing how far it is."""
    wants = part.warmup
    screen.line(
        f"Building {part.model.path}: imitating '{part.env.id}' to a solve rate of {wants.solve_rate}"
    )
    log = run.logs / "warmup.log"
    async with child.start("warmup", "rollway.warmup.imitate:main", log=log) as process:
        await process.begin_with(msgspec.msgpack.encode(part))
        while (frame := await process.pipe.receive()) is not None:
            match _said.decode(frame):
                case WarmupProgress(step=step, loss=loss, solve_rate=solved):
                    text = f"Warm-up step {step} | Loss: {loss:.3f} | Solve rate: {solved:.3f}"
                    (screen.line if step % 50 == 0 or solved >= wants.solve_rate else screen.status)(
                        text
                    )
                case WarmupEnded(error=error):
                    if error:
                        raise ModelError(error)
                    return
        raise PartDied(f"the warm-up died{last_words_in(log)}")
