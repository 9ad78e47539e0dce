"""The trainer's process: waits for manifests, has the core train them, publishes the versions."""

import asyncio
import socket

import msgspec

from ..config.parts import TrainerPart
from ..errors import PartDied
from ..loop import child
from ..loop.part import Parent, as_it_is, run_part
from ..records.ids import Step
from ..rundir.rundir import RunDir
from ..transport import filesystem
from .calls import Answer, Loaded, Train, Trained, Troubled

_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


async def train_all(part: TrainerPart, core: child.Child, run: RunDir) -> None:
    """Every step in order: its manifest, its weights, its publication."""
    for number in range(part.first_step, part.max_steps + 1):
        manifest = await filesystem.next_manifest(run, Step(number))
        await core.pipe.send(msgspec.msgpack.encode(Train(str(manifest))))
        match await _answer(core):
            case Trained(published=published):
                await filesystem.publish(published)
            case other:
                raise PartDied(f"the trainer's core answered {other}")


async def _answer(core: child.Child) -> Answer:
    frame = await core.pipe.receive()
    if frame is None:
        code = await core.wait()
        raise PartDied(f"the trainer's compute process (pid {core.pid}) died with exit code {code}")
    answer = _answers.decode(frame)
    if isinstance(answer, Troubled):
        raise PartDied(answer.error)
    return answer


async def trainer(part: TrainerPart, parent: Parent) -> None:
    """Train until the last step is published and the parent is gone."""
    async with child.start("trainer-core", "rollway.trainer.core:serve_core", computes=True) as core:
        await core.begin_with(msgspec.msgpack.encode(part))
        answer = await _answer(core)
        assert isinstance(answer, Loaded)
        await parent.ready()
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(train_all(part, core, RunDir(part.run_dir)))
            await parent.gone()
            training.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, TrainerPart, as_it_is, trainer)
