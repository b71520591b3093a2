"""What a drafter may see, and what it gives back. The engine, the trainer and a server each build the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hspec.drafters.tree import DraftTree


@runtime_checkable
class PagedKV(Protocol):
    """K and V of one layer that do not lie by position, and that know how to attend to them where they lie."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, causal: bool) -> Tensor:
        """One softmax over what each anchor sees before it and over its block; arguments and result as those of
        :func:`hspec.drafters.attention.attend`, with N = 1."""


LayerKV = tuple[Tensor, Tensor] | PagedKV
"""Tensors ``[B, kv_heads, capacity, d]`` by position, or pages."""


class KVSource(Protocol):
    """K/V by layer, the target's or a drafter's own: a view of a cache, or a server's pages. Row b is valid up to ``lengths[b]``."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
    def layer(self, index: int) -> LayerKV: ...


@dataclass(frozen=True)
class DraftContext:
    """B sequences with N anchors each (decoding: N = 1, one a sequence; training: many).

    An anchor is the last sampled token, not yet run by the target; its position p is the number of tokens before it.
    """

    anchors: Tensor
    """Token ids ``[B, N]`` int64."""
    positions: Tensor
    """Positions of the anchors ``[B, N]`` int64."""
    taps: Tensor
    """Tapped hidden states at position p - 1, ``[B, N, taps, hidden]``."""
    kv: KVSource
    """The target's post-RoPE K/V, row b for sequence b; the drafter reads positions before p only."""
    memory: KVSource | None = None
    """What the drafter itself keeps of every context token (see :meth:`hspec.drafters.drafter.Drafter.remember`), for those
    that do; an entry for each position before p."""
    history: tuple[tuple[int, ...], ...] | None = None
    """All tokens of each sequence, the anchor the last; for drafters that look them up."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.anchors.shape[0], self.anchors.shape[1]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens for each of B sequences: k in a row, or a tree of them."""

    tokens: Tensor
    """Target ids ``[B, k]``; not looked at where there are trees."""
    probabilities: Tensor | None
    """What each was drawn from, over the draft vocabulary, ``[B, k, draft vocabulary]``; None where the drafts are one-hot."""
    counts: tuple[int, ...] | None = None
    """How many of its k tokens each sequence really drafts; None for all. The rest is padding, and is never accepted."""
    trees: tuple[DraftTree, ...] | None = None
    """A tree below each sequence's anchor, no deeper than k and of ``max_nodes`` nodes at most. Trees are verified by the
    target's own draws: whatever they were chosen by, no distribution of theirs is asked for."""
    one_hot: tuple[bool, ...] | None = None
    """Whose drafts were not drawn from ``probabilities`` but are certain; None: nobody's, where there are probabilities."""
    chances: Tensor | None = None
    """How likely each draft is to stand, all before it included, by the drafter's confidence head, ``[B, k]`` (never rising along a
    chain); None without such a head, or if the drafter is not to say it. Each is known before its token is picked: it depends on the
    tokens before it alone."""

    @staticmethod
    def of_trees(trees: Sequence[DraftTree]) -> Draft:
        """For drafters that branch: nothing but trees."""
        return Draft(torch.empty(len(trees), 0, dtype=torch.int64), None, trees=tuple(trees))


class Chooser(Protocol):
    """Picks a draft token from its logits. The decoding loop supplies it, so that drafters know nothing of sampling."""

    def __call__(self, slot: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Slot 1..k and ``[B, draft vocabulary]`` logits -> draft ids ``[B]`` and the distributions, or None if one-hot."""

    def latent(self, logits: Tensor) -> Tensor:
        """Logits of a block's latent category ``[B, values]`` -> the categories ``[B]``."""


class GreedyChooser:
    """Takes the likeliest everywhere; drafts are one-hot."""

    def __call__(self, slot: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        return logits.argmax(-1), None

    def latent(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


greedy_chooser = GreedyChooser()


@dataclass(frozen=True)
class Prefix:
    """Which context positions each anchor sees: ``start <= t < stop``.

    The window is counted from the anchor and is the same for all its slots, in training and in serving.
    """

    start: Tensor
    stop: Tensor

    @staticmethod
    def before(positions: Tensor, window: int | None) -> Prefix:
        start = torch.zeros_like(positions) if window is None else (positions - window).clamp_min(0)
        return Prefix(start, positions)

    def mask(self, length: int) -> Tensor:
        """``[B, N, length]`` bool."""
        t = torch.arange(length, device=self.start.device)
        return (t >= self.start[..., None]) & (t < self.stop[..., None])
