"""The ranks of the trainer: processes with the same weights that sum their gradients."""

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others in a step. One that dies is noticed at once."""


class Collective:
    """This process among all ranks. The sums are the same, to the bit, in every one of them."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank = rank
        self.count = count

    def share(self, planned: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, ...]]:
        """This rank's micro-batches. A batch that was packed for another number of ranks, before a
        resume with other settings, is dealt out as it is."""
        return [one for part in planned[self.rank :: self.count] for one in part if one]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Of every rank, into each; a parameter that nobody used keeps none."""
        if self.count == 1:
            return
        ours = [one for one in parameters if one.requires_grad]
        used = torch.tensor([float(one.grad is not None) for one in ours])
        dist.all_reduce(used)
        for one, num_used in zip(ours, used.tolist(), strict=True):
            if num_used:
                grad = torch.zeros_like(one) if one.grad is None else one.grad
                dist.all_reduce(grad)
                one.grad = grad

    def sum(self, values: Sequence[float]) -> list[float]:
        """Of each value, over all ranks."""
        if self.count == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(one) for one in sums]


def meet(rank: int, count: int, meeting: str) -> Collective:
    """Find the other ranks, all of this machine, through the file `meeting`."""
    if count > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=PATIENCE
        )
    return Collective(rank, count)
