"""A rank: a process that computes its share of each step. The first rank writes the weights."""

import math
import shutil
import socket
import time
from pathlib import Path

import torch
from msgspec import msgpack

from ..errors import GradientError, ModelError, RollwayError, RunDirError, StateError
from ..loop.processes.child import receive_spec
from ..model.load import load_model, save_weights
from ..model.packing import RowModel
from ..model.proof import describe, open_rows, prove_rounded
from ..model.routers import check_replay
from ..records.engine import Published
from ..records.ids import PolicyVersion
from ..records.probe import Probe
from ..rundir.rundir import RunDir, write_whole
from .collective import Collective, join_ranks
from .probes import ProbeMaker
from .rank_processes import RankAnswer, RankDone, RankFailed, RankOrder, RankStart
from .state import TrainerState
from .step import Learner

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What a published version takes over from the model that it was trained from."""


class Rank:
    """The model and the optimizer of one rank, loaded from a model folder or from a saved state."""

    def __init__(self, start: RankStart, ranks: Collective) -> None:
        self._spec, self._point = start.spec, start.point
        config = start.spec.trainer
        torch.set_num_threads(config.threads)
        torch.manual_seed(start.spec.seed)
        self._run = RunDir(start.spec.run_dir)
        self._ranks = ranks
        if ranks.rank == 0:
            self._run.remove_partial()
        trusts_code = start.spec.model.trust_remote_code
        model = load_model(start.point.weights, trusts_code=trusts_code)
        rows = open_rows(model, start.packing or None)
        if config.replay_routes:
            check_replay(rows.model, rows.routers)
        self._learner = Learner(rows, config, ranks)
        if config.dtype != "float32" and not start.packing:
            prove_rounded(rows)
        self.packing, self.note = rows.packing, describe_packing(rows)
        is_exact = config.dtype == self._published_dtype == "float32"
        self._probes = ProbeMaker(
            rows,
            "float32" if is_exact else "bfloat16",
            has_cached_text=start.spec.probes_cache,
        )
        self._state = self._open_state()
        if ranks.rank == 0 and not self._run.probe_of(start.point.version).exists():
            self._save_probe(start.point.version)
        self._unsaved_bytes = 0
        """The payload of the batches since the last state."""

    def _open_state(self) -> TrainerState:
        point, learner = self._point, self._learner
        state = TrainerState(self._run, learner.weights, learner.optimizer)
        if point.state is not None:
            state.read(point.state, with_weights=point.takes_weights)
            learner.update_model()
        state.saved = point.version
        is_whole = point.takes_weights or point.version == 0
        if self._ranks.rank == 0 and not is_whole:
            # later versions could not be made again from what is on disk
            state.begin_save(point.version)
            state.finish_save()
        return state

    def train(self, order: RankOrder) -> RankDone:
        """Do what an order says. After a step the first rank writes weights and adds their record."""
        batch = order.batch
        waited_s = time.time() - batch.ready_s
        start_s = time.monotonic()
        manifest, reader = batch.manifest().without(order.without), batch.reader()
        if order.purpose == "try":
            self._learner.compute_gradients(manifest, reader)
            return RankDone()
        self._unsaved_bytes += sum(ref.length for ref in manifest.refs)
        if order.purpose == "train" and not self._ranks.rank:
            planned = [manifest.rows[row] for rows in manifest.micro_batches for row in rows]
            self._probes.prepare(PolicyVersion(batch.step - 1), planned, reader)
        metrics = self._learner.step(manifest, reader)
        left_out = tuple(self._learner.left_out)
        if self._ranks.rank:
            return RankDone(left_out=left_out)
        weights = self._learner.sample_weights()
        if order.purpose == "repeat":
            return RankDone(left_out=left_out, weights=weights)
        trained_s = time.monotonic()
        folder = self._run.weights_of(batch.version)
        probe = self._probes.make(batch.version)
        self._check_sanity(probe, batch.version)
        try:
            self._save_weights(folder)
            self._write_probe(probe)
            self._save_state(batch.version)
        except Exception as error:  # a full disk, or what transformers refuses to write
            raise RunDirError(
                f"cannot write version {batch.version} to {self._run.path}: {describe(error)}; "
                "--resume continues from the last version"
            ) from None
        metrics["time/open"] = max(0.0, waited_s)
        metrics["time/train"] = trained_s - start_s
        metrics["time/publish"] = time.monotonic() - trained_s
        saved = self._state.saved
        published = Published(batch.version, str(folder), metrics, saved)
        return RankDone(published, left_out, weights)

    @property
    def _published_dtype(self) -> str:
        config = self._spec.trainer
        return config.publish_dtype or config.dtype

    def _save_probe(self, version: PolicyVersion) -> None:
        self._write_probe(self._probes.make(version))

    def _write_probe(self, probe: Probe) -> None:
        write_whole(self._run.probe_of(probe.version), msgpack.encode(probe))

    def _check_sanity(self, probe: Probe, version: PolicyVersion) -> None:
        """Publish no weights with which the policy computes no numbers any more."""
        values = [value for text in probe.texts for value in text.logprobs]
        if not all(map(math.isfinite, values)):
            raise ModelError(
                f"step {version} has changed the model so much that its logprobs are not numbers: "
                f"trainer.lr = {self._spec.trainer.lr:g} is too high. Version {version} was not "
                f"published; --resume with a lower one continues from version {version - 1}"
            )

    def _save_weights(self, folder: Path) -> None:
        dtype, masters = self._published_dtype, self._learner.weights
        save_weights(self._learner.model, folder, dtype, masters)
        for name in COPIED_FILES:
            source = Path(self._point.weights) / name
            if source.exists():
                shutil.copyfile(source, folder / name)

    def _save_state(self, version: PolicyVersion) -> None:
        """Save the state with every checkpoint, and whenever the batches since the last one have grown
        larger than it: they have to be kept until then."""
        state = self._state
        if state.is_written:
            self.finish_state()
        is_last = version == self._spec.max_steps
        has_checkpoint = is_last or version % self._spec.trainer.checkpoint_every == 0
        most = min(state.num_bytes, self._spec.max_kept_bytes)
        if has_checkpoint or self._unsaved_bytes > most:
            self.finish_state()
            state.begin_save(version)
            self._unsaved_bytes = 0
        if has_checkpoint:
            self._run.begin_checkpoint(version)
        if is_last:
            self.finish_state()

    def finish_state(self) -> None:
        """Wait for the state that is being written, and complete its checkpoint."""
        before, state = self._state.saved, self._state
        state.finish_save()
        if state.saved != before:
            self._run.finish_checkpoint(state.saved)


def describe_packing(rows: RowModel) -> str:
    """Return what the user should know about how rows are computed; empty if nothing is lost."""
    if rows.packing == "packed" or not rows.errors:
        return ""
    way = "beside each other" if rows.packing == "padded" else "one by one"
    return (
        f"The trainer computes rows {way}, because rows that are packed end to end would change each "
        f"other in models of family '{rows.model.config.model_type}' ({rows.errors['packed']})"
    )


def serve_rank(name: str, sock: socket.socket) -> None:
    """Load the model, then train the batches that the front sends, until the front is gone."""
    pipe, start = receive_spec(sock, RankStart)
    try:
        ranks = join_ranks(start.rank, start.spec.trainer.ranks, start.meeting)
        rank = Rank(start, ranks)
        pipe.send(msgpack.encode(RankDone(note=rank.note, packing=rank.packing)))
        while (frame := pipe.receive()) is not None:
            order = msgpack.decode(frame, type=RankOrder)
            try:
                answer: RankAnswer = rank.train(order)
            except GradientError as error:
                answer = RankFailed(str(error), "gradient")
            pipe.send(msgpack.encode(answer))
        rank.finish_state()
    except StateError as error:
        pipe.send(msgpack.encode(RankFailed(str(error), "state")))
    except RollwayError as error:
        pipe.send(msgpack.encode(RankFailed(str(error))))
