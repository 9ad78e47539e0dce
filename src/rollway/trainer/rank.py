"""A process that computes: it takes its rank's part of each batch. The first rank writes the weights."""

import os
import shutil
import socket
import time
from pathlib import Path

import msgspec
import torch

from ..config.specs import TrainerSpec
from ..errors import ModelError, RollwayError
from ..model.load import load_model, save_weights
from ..model.routers import check_replay
from ..records.engine import Published
from ..records.ids import PolicyVersion, Step
from ..rundir.rundir import RunDir
from ..transport.batch import Batch
from ..wire.pipe import BlockingPipe
from .collective import Collective, meet
from .rank_processes import RankFailed, RankLoaded, RankStart, RankTookPart, RankTrained, TrainBatch
from .step import Learner

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OPTIMIZER = "optimizer.pt"
KEPT_OPTIMIZERS = 2
"""States of the last versions: the last may be half-published."""


class Rank:
    """Weights and optimizer of a run, from a model folder or a checkpoint."""

    def __init__(self, part: TrainerSpec, ranks: Collective) -> None:
        torch.set_num_threads(part.trainer.threads)
        torch.manual_seed(part.seed)
        self._part = part
        self._run = RunDir(part.run_dir)
        self._ranks = ranks
        model = load_model(part.weights)
        if part.trainer.replay_routes:
            check_replay(model)
        self._learner = Learner(model, part.trainer, ranks)
        if part.optimizer:
            self._restore(Path(part.optimizer))

    def train(self, batch: Batch) -> Published | None:
        """One step; the first rank's weights lie complete in the returned path, others return none."""
        waited_s = time.time() - batch.came_s
        start_s = time.monotonic()
        metrics = self._learner.step(batch.manifest(), batch.reader())
        if self._ranks.rank:
            return None
        trained_s = time.monotonic()
        folder = self._run.weights_of(batch.version)
        self._save_model(folder)
        self._save_optimizer(batch.version)
        every = self._part.trainer.checkpoint_every
        if batch.step == self._part.max_steps or batch.step % every == 0:
            self._checkpoint(batch.step)
        metrics["time/open"] = max(0.0, waited_s)
        metrics["time/train"] = trained_s - start_s
        metrics["time/publish"] = time.monotonic() - trained_s
        return Published(batch.version, str(folder), metrics)

    def _save_model(self, folder: Path) -> None:
        save_weights(self._learner.model, folder)
        for name in TOKENIZER_FILES:
            source = Path(self._part.weights) / name
            if source.exists():
                shutil.copy(source, folder / name)

    def _save_optimizer(self, version: PolicyVersion) -> None:
        """What a resume from this version goes on with; there before the version is published."""
        final = self._run.optimizer_of(version)
        final.parent.mkdir(exist_ok=True)
        partial = final.with_suffix(".partial")
        torch.save(self._learner.optimizer.state_dict(), partial)
        os.replace(partial, final)
        self._run.prune_optimizer(version, KEPT_OPTIMIZERS)

    def _checkpoint(self, step: Step) -> None:
        """Everything a resume needs, under its name only once it is whole."""
        final = self._run.checkpoint(step)
        partial = final.with_name(f"partial_{final.name}")
        shutil.rmtree(partial, ignore_errors=True)
        self._save_model(partial)
        torch.save(self._learner.optimizer.state_dict(), partial / OPTIMIZER)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        self._run.prune_checkpoints(self._part.trainer.keep_checkpoints)

    def _restore(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise ModelError(f"cannot read the optimizer's state {path}: {error}") from None
        self._learner.optimizer.load_state_dict(state)


def serve_rank(name: str, sock: socket.socket) -> None:
    """Load, then train what is asked for until the front is gone."""
    pipe = BlockingPipe(sock)
    first = pipe.receive()
    if first is None:
        return
    try:
        start = msgspec.msgpack.decode(first, type=RankStart)
        ranks = meet(start.rank, start.part.trainer.ranks, start.meeting)
        core = Rank(start.part, ranks)
        pipe.send(msgspec.msgpack.encode(RankLoaded()))
        while (frame := pipe.receive()) is not None:
            published = core.train(msgspec.msgpack.decode(frame, type=TrainBatch).batch)
            pipe.send(msgspec.msgpack.encode(RankTrained(published) if published else RankTookPart()))
    except RollwayError as error:
        pipe.send(msgspec.msgpack.encode(RankFailed(str(error))))
