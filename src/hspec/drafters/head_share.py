"""One rank's share of a drafter whose attention heads are spread over several, as a server's tensor parallelism spreads its target's.

A rank holds K and V of its own KV heads only, so it attends with the query heads that read these. What its heads add to the residual
stream is a partial sum, and the ranks' sums are added up: once for each attention sub-layer. All else is the same on every rank, so
that nothing but this file knows of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hspec.drafters.attention import PrefixAttention
from hspec.drafters.config import ParallelConfig
from hspec.drafters.drafter import Drafter
from hspec.errors import UsageError

Reduce = Callable[[Tensor], Tensor]
"""A tensor of each rank -> their sum, of the same shape, on all of them. Every rank calls it, in the same order."""


@dataclass(frozen=True)
class HeadShare:
    """The heads that one of several ranks has: consecutive ones."""

    heads: range
    kv_heads: range

    @staticmethod
    def of(heads: int, kv_heads: int, rank: int, ranks: int) -> HeadShare:
        """Where there are fewer KV heads than ranks, several ranks have the same one, each with other queries that read it.

        Raises:
            UsageError: the heads cannot be shared out evenly.
        """
        if not can_share(heads, kv_heads, ranks):
            raise UsageError(f"{heads} query and {kv_heads} KV heads cannot be spread evenly over {ranks} ranks")
        own, own_kv = heads // ranks, max(1, kv_heads // ranks)
        first = rank * kv_heads // ranks
        return HeadShare(range(rank * own, (rank + 1) * own), range(first, first + own_kv))


def can_share(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether every rank gets as many query heads, and whole KV heads: as many of them, or one that others have too."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


class SummedLinear(nn.Module):
    """The output projection of some of the heads, then the sum over all ranks: ``[..., own heads * d]`` -> ``[..., hidden]``."""

    def __init__(self, linear: nn.Linear, reduce: Reduce):
        super().__init__()
        self.linear, self.reduce = linear, reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.linear(x))


@torch.no_grad()
def keep_share(drafter: Drafter, rank: int, ranks: int, reduce: Reduce) -> None:
    """Cut a loaded drafter down to a rank's heads, before :meth:`hspec.drafters.drafter.Drafter.prepare`; for inference only.

    From then on its configuration, and so what it keeps for every token, is that of the share.

    Raises:
        UsageError: the heads cannot be shared out evenly.
    """
    config = drafter.config
    if not isinstance(config, ParallelConfig):
        raise AssertionError(f"a drafter of the method {config.method} has no share of heads")
    if config.attention is None:
        return
    share = HeadShare.of(config.attention.heads, config.attention.kv_heads, rank, ranks)
    own = config.attention.model_copy(update={"heads": len(share.heads), "kv_heads": len(share.kv_heads)})
    drafter.config = config.model_copy(update={"attention": own})
    for layer in drafter.modules():
        if isinstance(layer, PrefixAttention):
            layer.config = own
            layer.q_proj = _linear(layer.q_proj.weight[_rows(share.heads, own.head_dim)])
            layer.k_proj = _linear(layer.k_proj.weight[_rows(share.kv_heads, own.head_dim)])
            layer.v_proj = _linear(layer.v_proj.weight[_rows(share.kv_heads, own.head_dim)])
            partial = _linear(layer.o_proj.weight[:, _rows(share.heads, own.head_dim)])
            layer.add_module("o_proj", SummedLinear(partial, reduce))


def _rows(heads: range, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)


def _linear(weight: Tensor) -> nn.Linear:
    """A frozen linear layer with a copy of this weight, ``[outputs, inputs]``, so that the rest of it can go."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format), requires_grad=False)
    return linear
