"""The state that training continues from after a restart: the weights in float32, and the optimizer's
averages.

It is larger than the model and changes in every step, so it is written only now and then, beside
training. A trainer that dies trains the batches since then again.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn import Parameter

from ..errors import StateError
from ..records.ids import PolicyVersion
from ..rundir.rundir import RunDir, partial_of, remove_folder, sync, sync_folder

WEIGHT = "weight"
"""The name of a weight itself among the tensors that are saved of it. The others are the optimizer's."""


class TrainerState:
    """Writes the state of some versions to the run directory, and reads one back."""

    def __init__(
        self, run: RunDir, weights: dict[str, Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self._run = run
        self._weights = weights
        self._optimizer = optimizer
        self._writing: tuple[PolicyVersion, Any] | None = None
        self.saved = PolicyVersion(0)
        """The newest version that a restart can begin from. Version 0 is the model itself."""

    @property
    def num_bytes(self) -> int:
        """The size of a state on disk: a weight and two averages of it."""
        return sum(3 * weight.nbytes for weight in self._weights.values())

    def begin_save(self, version: PolicyVersion) -> None:
        """Copy the state, and write it while training goes on. If another one is still being written,
        wait for that first."""
        self.finish_save()
        partial = partial_of(self._run.state_of(version))
        writing = async_save(self._tensors(), checkpoint_id=partial, no_dist=True)
        self._writing = version, writing

    @property
    def is_written(self) -> bool:
        """Whether `finish_save` returns without waiting."""
        return self._writing is None or self._writing[1].done()

    def finish_save(self) -> None:
        """Wait until the state that was begun is written, and give it its final name."""
        if self._writing is not None:
            (version, writing), self._writing = self._writing, None
            writing.result()
            final = self._run.state_of(version)
            remove_folder(final)
            sync_folder(partial_of(final))
            partial_of(final).rename(final)
            sync(final.parent)
            self.saved = version

    def read(self, version: PolicyVersion, *, with_weights: bool) -> None:
        """Continue from a saved state, or only with its averages."""
        folder = self._run.state_of(version)
        try:
            names = FileSystemReader(folder).read_metadata().state_dict_metadata
            tensors = {
                name: self._target(name)
                for name in names
                if with_weights or not name.startswith(f"{WEIGHT}/")
            }
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                load(tensors, checkpoint_id=folder, no_dist=True)
        except Exception as error:  # torch unpickles a part of it
            raise StateError(f"cannot read the trainer's state {folder}: {error}") from None

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {
            f"{WEIGHT}/{name}": weight.detach() for name, weight in self._weights.items()
        }
        for name, weight in self._weights.items():
            for kind, value in self._optimizer.state[weight].items():
                tensors[f"{kind}/{name}"] = value
        return tensors

    def _target(self, saved_name: str) -> Tensor:
        """Return the tensor that a saved one is read into."""
        kind, _, name = saved_name.partition("/")
        weight = self._weights[name]
        if kind == WEIGHT:
            return weight.detach()
        is_count = kind == "step"
        value = torch.zeros(()) if is_count else torch.zeros_like(weight, requires_grad=False)
        self._optimizer.state[weight][kind] = value
        return value
