"""Ranks that share a target, as threads of one process, or as processes of gloo's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
PATIENCE = 60
"""Seconds that ranks wait for each other, so that a test in which one calls more than the others ends."""


@dataclass
class _Table:
    """Where ranks lay down what they have for each other."""

    count: int
    places: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [torch.empty(0)] * self.count
        self.barrier = threading.Barrier(self.count)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.places[rank] = tensor.clone()
        self.barrier.wait(PATIENCE)
        found = list(self.places)
        self.barrier.wait(PATIENCE)
        return found


class ThreadGroup:
    """See :class:`hspec.serving.ranks.Group`. Sums begin with the rank's own part, as those of vLLM's CPU backend do, so that the
    last bits differ between ranks."""

    def __init__(self, table: _Table, rank: int):
        self.table, self.rank_in_group, self.world_size = table, rank, table.count
        self.sums = 0

    def all_reduce(self, input_: Tensor) -> Tensor:
        parts = self.table.exchange(self.rank_in_group, input_)
        self.sums += 1
        out = torch.zeros_like(input_)
        for i in range(self.world_size):
            out = out + parts[(self.rank_in_group + i) % self.world_size]
        return out

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self.table.exchange(self.rank_in_group, input_), dim)

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        return input_.copy_(self.table.exchange(self.rank_in_group, input_)[src])


def on_ranks(count: int, act: Callable[[ThreadGroup], T]) -> list[T]:
    """Call it on every rank at once; results by rank."""
    table = _Table(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: act(ThreadGroup(table, rank)), range(count)))


class GlooGroup:
    """The same over the processes of ``torch.distributed``."""

    def __init__(self) -> None:
        self.rank_in_group, self.world_size = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, input_: Tensor) -> Tensor:
        dist.all_reduce(input_)
        return input_

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        parts = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(parts, input_)
        return torch.cat(parts, dim)

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        dist.broadcast(input_, src)
        return input_


def heads_of(tensors: Sequence[Tensor], heads: range) -> list[Tensor]:
    """K/V heads ``[B, kv_heads, ...]`` of a rank."""
    return [t[:, heads.start : heads.stop] for t in tensors]
