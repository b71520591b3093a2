"""What one step puts to the target: the anchors, and behind each a chain or a tree of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hspec.decoding.verify import Verdict
from hspec.decoding.verify_tree import TreeVerdict
from hspec.drafters.context import Draft
from hspec.drafters.tree import DraftTree, tree_rows

Tested = list[int] | DraftTree
"""The drafts of one sequence that are put to the test."""
Judged = Verdict | TreeVerdict
"""What comes of it: ``rows`` that stand, the anchor's 0 first, and the target's ``token`` behind them."""


@dataclass(frozen=True)
class Proposal:
    """Row 0 of a sequence is its anchor, row i + 1 the i-th draft of its chain, or node i of its tree."""

    tokens: Tensor
    """What the target runs, ``[B, rows]``; behind the drafts of a sequence stands padding, or what is not tested."""
    tested: Sequence[Tested]
    q: Sequence[Tensor | None] | None = None
    """What each chain was drawn from, ``[k, draft vocabulary]`` (see :attr:`hspec.drafters.context.Draft.probabilities`); None where it
    is one-hot, or all are."""

    @staticmethod
    def of(anchors: Tensor, draft: Draft | None, limits: Sequence[int]) -> Proposal:
        """
        Args:
            anchors: ``[B, 1]``.
            draft: None for no drafts at all.
            limits: how deep each sequence's drafts may be: its own limit, so that a neighbour near its end does not change
                what of this one is tested.
        """
        if draft is None:
            return Proposal(anchors, [[] for _ in limits])
        if draft.trees is not None:
            trees = [tree.cut(limit) for tree, limit in zip(draft.trees, limits, strict=True)]
            return Proposal(tree_rows(anchors[:, 0].tolist(), trees)[0].to(anchors.device), trees)
        counts = draft.counts or (draft.tokens.shape[1],) * len(limits)
        ends = [min(count, limit) for count, limit in zip(counts, limits, strict=True)]
        chains = [own[:end] for own, end in zip(draft.tokens.tolist(), ends, strict=True)]
        return Proposal(torch.cat((anchors, draft.tokens[:, : max(ends)]), dim=1), chains, _drawn_from(draft))

    @property
    def depths(self) -> list[tuple[int, ...]] | None:
        """Of trees, what :meth:`hspec.targets.target.Target.forward` must know of them; None for chains."""
        trees = [tested.row_depths for tested in self.tested if isinstance(tested, DraftTree)]
        return trees or None

    def refused(self, row: int, verdict: Judged) -> list[int]:
        """The drafts behind the last accepted one, none of which stood: the rest of a chain, or the children of a node."""
        tested, last = self.tested[row], verdict.rows[-1]
        if isinstance(tested, DraftTree):
            return [tested.tokens[node] for node in tested.children[last]]
        return tested[last:]

    def accepted(self, verdicts: Sequence[Judged]) -> list[list[int]]:
        """The tokens of the drafts that stand, of each sequence."""
        tokens = self.tokens.tolist()
        return [[own[i] for i in verdict.rows[1:]] for own, verdict in zip(tokens, verdicts, strict=True)]


def _drawn_from(draft: Draft) -> Sequence[Tensor | None] | None:
    if draft.probabilities is None:
        return None
    certain = draft.one_hot or (False,) * len(draft.probabilities)
    return [None if sure else q for sure, q in zip(certain, draft.probabilities, strict=True)]
