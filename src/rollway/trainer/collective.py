"""Lets ranks work together: each has the same weights, and they sum their gradients."""

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others in a step. The front notices a rank that dies at once."""


class Collective:
    """A rank's view of all ranks: its share of the work, and sums, which are the same, to the bit, in
    every rank. `RankProcesses` is the front's view of the same ranks."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank = rank
        self.count = count

    def share(self, planned: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, ...]]:
        """Return the micro-batches of this rank. If a batch was packed for another number of ranks,
        before a resume with other settings, its parts are dealt out in turn."""
        shares = planned[self.rank :: self.count]
        return [micro_batch for share in shares for micro_batch in share if micro_batch]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over all ranks. A parameter that no rank used keeps none."""
        if self.count == 1:
            return
        weights = [parameter for parameter in parameters if parameter.requires_grad]
        num_used = torch.tensor([float(weight.grad is not None) for weight in weights])
        dist.all_reduce(num_used)
        for weight, count in zip(weights, num_used.tolist(), strict=True):
            if count:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                dist.all_reduce(weight.grad)

    def sum(self, values: Sequence[float]) -> list[float]:
        if self.count == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(value) for value in sums]


def join_ranks(rank: int, count: int, meeting: str) -> Collective:
    """Find the other ranks, which are all on this machine, through the file `meeting`."""
    if count > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=count,
            timeout=PATIENCE,
        )
    return Collective(rank, count)
