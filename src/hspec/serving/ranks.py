"""The processes that share a target by tensor parallelism, and what a drafter has them do together. Nothing here knows vLLM.

Every rank drafts, because each holds K/V of its own heads alone. Everything but attention is computed by all of them alike; still they
need not agree in the last bit (a sum over ranks may be taken in another order on each), and a rank whose distributions differ would
one day accept another token than its neighbours. So the first one's drafts, and what they were drawn from, are everyone's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.drafters.context import Draft
from hspec.drafters.head_share import can_share
from hspec.errors import UsageError


class Group(Protocol):
    """What is asked of vLLM's ``GroupCoordinator``; all ranks call the same, in the same order."""

    rank_in_group: int
    world_size: int

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum, on every rank; may overwrite ``input_``."""

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Tensors of one shape, one behind the other along ``dim``."""

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        """That of rank ``src``, written to ``input_`` on the others."""


@dataclass(frozen=True)
class Ranks:
    """This process among them; as it stands here, one alone."""

    group: Group | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank_in_group

    @property
    def count(self) -> int:
        return 1 if self.group is None else self.group.world_size

    def sum(self, part: Tensor) -> Tensor:
        """Of all ranks' tensors of this shape."""
        return part if self.group is None else self.group.all_reduce(part.contiguous())

    def join(self, rows: Tensor) -> Tensor:
        """All ranks' rows ``[n, ...]``, in the order of ranks: ``[ranks * n, ...]``."""
        return rows if self.group is None else self.group.all_gather(rows.contiguous(), dim=0)

    def agree(self, draft: Draft) -> Draft:
        """The first rank's draft: k tokens and, where they were drawn, k distributions over the draft vocabulary of each sequence, and
        how many of them count."""
        if self.group is None:
            return draft
        tokens, q, counts = draft.tokens, draft.probabilities, draft.counts
        said = None if counts is None else self.group.broadcast(tokens.new_tensor(counts), src=0).tolist()
        return replace(
            draft,
            tokens=self.group.broadcast(tokens.contiguous(), src=0),
            probabilities=None if q is None else self.group.broadcast(q.contiguous(), src=0),
            counts=None if said is None else tuple(said),
        )


ALONE = Ranks()


def check_ranks(config: DrafterConfig, ranks: int, where: str) -> None:
    """
    Args:
        ranks: over which the target's heads are spread.

    Raises:
        UsageError: the drafter's cannot be spread so.
    """
    attention = config.attention if isinstance(config, ParallelConfig) else None
    if attention is not None and not can_share(attention.heads, attention.kv_heads, ranks):
        raise UsageError(f"the drafter at {where} has {heads_refusal(attention.heads, attention.kv_heads, ranks)}")


def heads_refusal(heads: int, kv_heads: int, ranks: int) -> str:
    """The end of a sentence about heads that cannot be spread; it has the numbers of ranks over which they can be."""
    fitting = [n for n in range(1, heads + 1) if can_share(heads, kv_heads, n)]
    return (
        f"{heads} query heads and {kv_heads} KV heads, which {ranks} ranks cannot share: choose another --tensor-parallel-size (these "
        f"heads allow {_either(fitting)})"
    )


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))
