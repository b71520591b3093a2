"""The target's distributions over the draft vocabulary, of a few positions at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Logits = Callable[[Tensor], Tensor]
PART = 128
"""Of a row: a multiple of what a processor compares at once."""


@dataclass(frozen=True)
class Distributions:
    """Of n positions over D draft ids; the full distribution, not renormalised."""

    p: Tensor
    """``[n, D]``."""
    mass: Tensor
    """sum p, ``[n]``."""
    log_mean: Tensor
    """sum p log p, ``[n]``."""
    argmax: Tensor
    """Of the full vocabulary, ``[n]`` target ids."""


@dataclass(frozen=True)
class TargetRows:
    """Where the target's distributions come from: hidden rows and the functions that turn them into probabilities."""

    hidden: Tensor
    """After the target's final norm, ``[P, hidden]``."""
    logits: Logits
    """``[n, hidden]`` -> ``[n, vocabulary]`` fp32."""
    draft_ids: Tensor
    """``[D]`` target ids."""

    def at(self, positions: Tensor) -> Distributions:
        """Of the hidden rows ``positions`` ``[n]``."""
        full = self.logits(self.hidden[positions])
        argmax = argmax_of_rows(full)
        full = full.log_softmax(-1)
        log_p = full.index_select(-1, self.draft_ids)
        del full
        p = log_p.exp()
        return Distributions(p, p.sum(-1), log_p.mul_(p).sum(-1), argmax)


def argmax_of_rows(values: Tensor) -> Tensor:
    """``[n, width]`` -> ``[n]`` int64. The parts' maxima first: they are found many elements at a time, an argmax is not (on a CPU
    eight times as fast)."""
    n, width = values.shape
    if width % PART or n == 0:
        return values.argmax(-1)
    parts = values.view(n, -1, PART)
    best = parts.amax(-1).argmax(-1)
    within = parts.take_along_dim(best[:, None, None], dim=1).squeeze(1).argmax(-1)
    return best * PART + within
