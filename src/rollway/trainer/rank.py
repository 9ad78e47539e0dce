"""A rank: a process that computes its share of each step. The first rank writes the weights."""

import os
import shutil
import socket
import time
from pathlib import Path

import torch
from msgspec import msgpack

from ..config.specs import TrainerSpec
from ..errors import ModelError, RollwayError
from ..loop.processes.child import receive_spec
from ..model.load import load_model, save_weights
from ..model.routers import check_replay
from ..records.engine import Published
from ..records.ids import PolicyVersion, Step
from ..rundir.rundir import RunDir, remove_folder
from ..transport.batch import Batch
from .collective import Collective, join_ranks
from .rank_processes import RankDone, RankFailed, RankStart
from .step import Learner

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OPTIMIZER = "optimizer.pt"
KEPT_OPTIMIZERS = 2
"""A resume needs the state of the last published version, and the newest may not be published yet."""


class Rank:
    """The model and the optimizer of one rank, loaded from a model folder or a checkpoint."""

    def __init__(self, spec: TrainerSpec, ranks: Collective) -> None:
        torch.set_num_threads(spec.trainer.threads)
        torch.manual_seed(spec.seed)
        self._spec = spec
        self._run = RunDir(spec.run_dir)
        self._ranks = ranks
        model = load_model(spec.weights)
        if spec.trainer.replay_routes:
            check_replay(model)
        self._learner = Learner(model, spec.trainer, ranks)
        if spec.optimizer:
            self._restore(Path(spec.optimizer))

    def train(self, batch: Batch) -> Published | None:
        """Take one step. The first rank writes the weights and returns their record, others None."""
        waited_s = time.time() - batch.ready_s
        start_s = time.monotonic()
        metrics = self._learner.step(batch.manifest(), batch.reader())
        if self._ranks.rank:
            return None
        trained_s = time.monotonic()
        folder = self._run.weights_of(batch.version)
        self._save_model(folder)
        self._save_optimizer(batch.version)
        step, every = batch.step, self._spec.trainer.checkpoint_every
        if step == self._spec.max_steps or step % every == 0:
            self._checkpoint(step)
        metrics["time/open"] = max(0.0, waited_s)
        metrics["time/train"] = trained_s - start_s
        metrics["time/publish"] = time.monotonic() - trained_s
        return Published(batch.version, str(folder), metrics)

    def _save_model(self, folder: Path) -> None:
        save_weights(self._learner.model, folder)
        for name in TOKENIZER_FILES:
            source = Path(self._spec.weights) / name
            if source.exists():
                shutil.copy(source, folder / name)

    def _save_optimizer(self, version: PolicyVersion) -> None:
        """Save the state that a resume from this version needs, before the version is published."""
        final = self._run.optimizer_of(version)
        final.parent.mkdir(exist_ok=True)
        partial = final.with_suffix(".partial")
        torch.save(self._learner.optimizer.state_dict(), partial)
        os.replace(partial, final)
        self._run.prune_optimizer(version, KEPT_OPTIMIZERS)

    def _checkpoint(self, step: Step) -> None:
        """Save weights and optimizer. The folder gets its final name once it is complete."""
        final = self._run.checkpoint(step)
        partial = final.with_name(f"partial_{final.name}")
        shutil.rmtree(partial, ignore_errors=True)
        self._save_model(partial)
        torch.save(self._learner.optimizer.state_dict(), partial / OPTIMIZER)
        remove_folder(final)
        os.replace(partial, final)
        self._run.prune_checkpoints(self._spec.trainer.keep_checkpoints)

    def _restore(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise ModelError(f"cannot read the optimizer state {path}: {error}") from None
        self._learner.optimizer.load_state_dict(state)


def serve_rank(name: str, sock: socket.socket) -> None:
    """Load the model, then train the batches that the front sends, until the front is gone."""
    pipe, start = receive_spec(sock, RankStart)
    try:
        rank = Rank(
            start.spec, join_ranks(start.rank, start.spec.trainer.ranks, start.meeting)
        )
        pipe.send(msgpack.encode(RankDone()))
        while (frame := pipe.receive()) is not None:
            batch = msgpack.decode(frame, type=Batch)
            pipe.send(msgpack.encode(RankDone(rank.train(batch))))
    except RollwayError as error:
        pipe.send(msgpack.encode(RankFailed(str(error))))
