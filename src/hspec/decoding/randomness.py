"""Random numbers as a pure function of (seed, position, purpose).

Nothing is kept between steps, so a request's text cannot depend on what else is in the batch, on how its steps fell, or on
whether it was interrupted. The mixer is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a number is drawn for; numbers for different purposes at one position are independent."""

    TARGET = 1
    """The target's own token at a position (no draft there, a residual after a rejection, or a bonus token)."""
    DRAFT = 2
    """The drafter's token at a position."""
    ACCEPT = 3
    """Whether the draft token at a position is accepted."""
    LATENT = 4
    """The latent category of a block whose anchor is at a position."""


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) with 53 random bits."""
    x = _mix((seed + _GOLDEN) & _MASK)
    x = _mix((x + position * _GOLDEN + purpose * 0xD1B54A32D192ED03) & _MASK)
    return (_mix((x + _GOLDEN) & _MASK) >> 11) * 2.0**-53


def sample(probabilities: Tensor, u: Tensor) -> Tensor:
    """Draw by inverting the distribution function.

    Args:
        probabilities: ``[rows, n]``, not negative, need not sum to one.
        u: ``[rows]`` float64 in [0, 1).

    Returns:
        ``[rows]`` int64; never an entry of probability 0. Sums run in float64, so that small entries are not lost.
    """
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[:, -1:]
    # The smallest index whose cumulative sum exceeds u * total: an entry of probability 0 never exceeds its predecessor, and
    # the last sum always does, as u * total rounds to less than total for every u up to 1 - 2^-53.
    return torch.searchsorted(cumulative, u.double()[:, None] * total, right=True).squeeze(-1)
