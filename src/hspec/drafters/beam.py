"""Beam search over a drafter that goes step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BeamStep = Callable[[Tensor, Tensor], Tensor]
"""Last tokens ``[B, W]`` (draft ids) and which of the former beams each continues ``[B, W]`` -> log-probabilities of the next
token ``[B, W, draft vocabulary]``. The drafter reorders its own state by the second; at its first call all of it is 0, the
one state there is."""


def beam_search(first: Tensor, step: BeamStep, width: int, depth: int) -> tuple[Tensor, Tensor]:
    """The ``width`` continuations that score best, kept from token to token.

    Args:
        first: log-probabilities of the first token, ``[B, draft vocabulary]``.
        width: beams, at most the draft vocabulary's size are kept.
        depth: tokens of each, 1 at least.

    Returns:
        Draft ids ``[B, W, depth]`` int64, the best beam first, and the sums of their log-probabilities ``[B, W]``.
    """
    vocabulary = first.shape[-1]
    width = min(width, vocabulary)
    scores, tokens = first.topk(width)
    parents, beams = torch.zeros_like(tokens), tokens[..., None]
    for length in range(1, depth):
        scores, best = (scores[..., None] + step(tokens, parents)).flatten(1).topk(width)
        parents, tokens = best // vocabulary, best % vocabulary
        kept = beams.gather(1, parents[..., None].expand(-1, -1, length))
        beams = torch.cat((kept, tokens[..., None]), 2)
    return beams, scores
