"""How several processes train one drafter: copies whose gradients are averaged (DDP), or shares of one (FSDP2).

The drafter and its loss are one module here, so that the whole step is one forward, whatever parts of the drafter the loss calls.
FSDP2 takes it as one unit: every process keeps its share of the fp32 weights, the gradients, the optimiser's moments and the average,
and the whole weights exist from a step's forward to its backward. A drafter is small enough for that; its optimiser may not be.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hspec.drafters.drafter import Drafter
from hspec.training.blocks import BlockBatch
from hspec.training.loss import BlockLoss, LossSums
from hspec.training.objective import LossWeights
from hspec.training.processes import Processes


class Step(nn.Module):
    """The loss of a batch of blocks, as a module."""

    def __init__(self, drafter: Drafter, loss: BlockLoss):
        super().__init__()
        self.drafter = drafter
        self._loss = loss

    def forward(self, blocks: BlockBatch, weights: LossWeights, done: float) -> tuple[Tensor, LossSums]:
        """The sum of the losses apart from the rest: DDP and FSDP2 look for tensors to watch, and not into dataclasses."""
        sums = self._loss(blocks, weights, done)
        return sums.total, sums


def distribute(step: Step, processes: Processes, shard: bool) -> nn.Module:
    """The same module for several processes: its backward leaves the mean of their gradients. All begin with the first one's weights."""
    if processes.count == 1:
        return step
    if not shard:
        # Which parts take part changes as the block grows. And with the search for unused ones the buckets stay as they are from
        # the first step on, so that a resumed run adds its gradients up in the same order.
        with warnings.catch_warnings():
            # The argument's successor is not in every version that is supported. Buffers are the target's, frozen and large.
            warnings.simplefilter("ignore", FutureWarning)
            return nn.parallel.DistributedDataParallel(step, find_unused_parameters=True, broadcast_buffers=False)
    for parameter in step.parameters():
        torch.distributed.broadcast(parameter.detach(), src=0)
    fully_shard(step, mesh=init_device_mesh(processes.device.type, (processes.count,)))
    return step


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """While it lasts the drafter has its whole weights also if they are shared out; every process must come here."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def own(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: its share, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor without its distribution; every process must come here."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shared_out_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of another, and distributed as that is, if it has its shape; else as it is."""
    if tensor.shape != like.shape:
        return tensor
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    # Every process has all of it: nothing needs to be sent.
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
