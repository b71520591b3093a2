"""From a batch of documents to blocks: where anchors stand, what the target knows there, which slots count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hspec.drafters.context import DraftContext
from hspec.drafters.drafter import Drafter
from hspec.targets.cache import KVView
from hspec.training.apportion import apportion
from hspec.training.examples import Batch
from hspec.training.features import Features


@dataclass(frozen=True)
class Anchors:
    """N anchors in each of B documents."""

    positions: Tensor
    """``[B, N]``; padding repeats a valid anchor."""
    valid: Tensor
    """``[B, N]`` bool."""


def anchor_counts(candidates: Sequence[int] | np.ndarray, density: float, cap: int | None = None) -> np.ndarray:
    """How many anchors each document of a batch gets, ``[B]``: one first, if it has a candidate, then half of the others in proportion to
    the candidates and half to all alike, as far as each has them. So a short document is not lost beside long ones, and a long one is
    still worth more.

    All together they are ``density`` of the batch's candidates, rounded up, and one for each document at least.

    Args:
        candidates: ``[B]``. cap: at most so many in one document; fewer are drawn where no other document has room.
    """
    has = np.asarray(candidates, dtype=np.int64)
    if not has.any():
        return has
    room = has if cap is None else np.minimum(has, cap)
    first = (room > 0).astype(np.int64)
    total = math.ceil(density * int(has.sum()) - 1e-9)
    weights = has / has.sum() + first / first.sum()
    return first + apportion(max(0, total - int(first.sum())), weights, room - first)


def draw_anchors(batch: Batch, density: float, generator: torch.Generator, cap: int | None = None) -> Anchors:
    """Random anchors without replacement, as many a document as :func:`anchor_counts` says.

    A candidate is a token with a token before it (whose hidden state seeds the block) and a supervised token behind it. One
    row is one document, so a block, its anchor and its anchor - 1 lie in one document.
    """
    candidates = batch.supervised[:, 1:].clone()
    candidates[:, 0] = False  # position 0 has no token before it
    scores = torch.rand(candidates.shape, generator=generator).masked_fill(~candidates, 2.0)
    counts = torch.from_numpy(anchor_counts(candidates.sum(1).numpy(), density, cap))
    width = max(1, int(counts.max()))
    order = scores.argsort(1)[:, :width]
    valid = torch.arange(order.shape[1])[None, :] < counts[:, None]
    fallback = order[:, :1].clamp_min(1)
    return Anchors(torch.where(valid, order, fallback), valid)


@dataclass(frozen=True)
class BlockBatch:
    """All that the drafter and the objective need for B x N blocks of k slots."""

    context: DraftContext
    previous: Tensor
    """True token before each slot, ``[B, N, k]``."""
    tokens: Tensor
    """True token of each slot, ``[B, N, k]``."""
    rows: Tensor
    """Row of ``hidden`` that predicts each slot's token, ``[B, N, k]``."""
    weight: Tensor
    """1.0 where the slot's token is supervised and in the document, ``[B, N, k]``."""
    hidden: Tensor
    """The target's final hidden states, ``[B * T, hidden]``."""
    taps: Tensor
    """Tapped hidden states of all positions, ``[B, T, F, hidden]``."""
    following: Tensor
    """The token behind each position, ``[B, T]``; behind the last one padding, which no block looks at."""

    def context_for(self, drafter: Drafter) -> DraftContext:
        """The blocks' context with what the drafter keeps of every position, if it keeps anything: gradients flow through."""
        if drafter.memory_shape is None:
            return self.context
        positions = torch.arange(self.following.shape[1], device=self.following.device).expand_as(self.following)
        kept = drafter.remember(self.taps, self.following, positions, None)
        memory = KVView([k for k, _ in kept], [v for _, v in kept], self.context.kv.lengths)
        return replace(self.context, memory=memory)


def cut_blocks(features: Features, batch: Batch, anchors: Anchors, k: int) -> BlockBatch:
    """Blocks of k slots from what the frozen target left of the documents."""
    device = features.hidden.device
    tokens, positions = batch.tokens.to(device), anchors.positions.to(device)
    B, T = tokens.shape
    row = torch.arange(B, device=device)[:, None]
    context = DraftContext(tokens[row, positions], positions, features.taps[row, positions - 1], features.kv)
    predicted = positions[..., None] + torch.arange(1, k + 1, device=device)
    inside = predicted < T
    predicted = predicted.clamp_max(T - 1)
    weight = batch.supervised.to(device)[row[..., None], predicted] & inside & anchors.valid.to(device)[..., None]
    # A slot counts only if every slot before it does: behind the document's end, or a turn that is not the assistant's, the
    # block is over.
    weight = weight.float().cumprod(-1)
    return BlockBatch(
        context=context,
        previous=tokens[row[..., None], predicted - 1],
        tokens=tokens[row[..., None], predicted],
        rows=row[..., None] * T + predicted - 1,
        weight=weight,
        hidden=features.hidden.reshape(B * T, -1),
        taps=features.taps,
        following=torch.cat((tokens[:, 1:], tokens[:, -1:]), dim=1),
    )
