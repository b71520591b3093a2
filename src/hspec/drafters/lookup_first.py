"""A trained drafter that copies where the text repeats itself: prompt lookup first, the drafter where nothing is found.

What a drafter learns from chat is to go on in likely words. Where an answer quotes its prompt the next words are rather those behind
the place that is quoted, which lookup finds for nothing. Both are verified alike, so the text is the target's whichever drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hspec.drafters.context import Chooser, Draft, DraftContext, greedy_chooser
from hspec.drafters.drafter import Drafter
from hspec.drafters.ngram import NAME as NGRAM
from hspec.drafters.ngram import NgramDrafter
from hspec.drafters.tree import DraftTree
from hspec.drafters.while_sure import WhileSure
from hspec.targets.cache import KVView

SUFFIX = f"+{NGRAM}"
"""Behind a drafter's folder or name: with lookup first."""
LONGEST, SHORTEST = 5, 3
"""Of the last tokens so many are looked for, the most first; what followed the fewest is drafted at the least."""
LONGEST_COPY = 10


class LookupFirst:
    """
    Args:
        drafter: asked where nothing is found.
        lookup: by default :func:`usual_lookup`.
    """

    reads_history = True

    def __init__(self, drafter: Drafter | WhileSure, lookup: NgramDrafter | None = None):
        self.drafter, self.lookup = drafter, lookup or usual_lookup(drafter)
        self.taps, self.draft_ids = drafter.taps, drafter.draft_ids
        self.max_draft, self.max_nodes = drafter.max_draft, max(drafter.max_nodes, self.lookup.max_draft)
        self.memory_shape = drafter.memory_shape

    def remember(self, taps: Tensor, following: Tensor, positions: Tensor, past: KVView | None) -> list[tuple[Tensor, Tensor]]:
        return self.drafter.remember(taps, following, positions, past)

    def propose(self, context: DraftContext, k: int, choose: Chooser = greedy_chooser) -> Draft:
        """``k`` tokens of the drafter, or up to the lookup's own most of what is copied, for each sequence as its text is."""
        copies = self.lookup.propose(context, self.lookup.max_draft)
        assert copies.counts is not None
        if all(copies.counts):
            return copies
        draft = self.drafter.propose(context, k, choose)
        return _merged(draft, copies) if any(copies.counts) else draft


def usual_lookup(drafter: Drafter | WhileSure, longest_copy: int = LONGEST_COPY) -> NgramDrafter:
    """For suffixes of :data:`SHORTEST` to :data:`LONGEST` tokens, and copies of so many tokens at most."""
    vocabulary, device = drafter.embedding.shape[0], drafter.embedding.device
    return NgramDrafter(vocabulary, longest_copy, LONGEST, SHORTEST, device)


def _merged(draft: Draft, copies: Draft) -> Draft:
    """``copies`` where there are some, ``draft`` elsewhere."""
    assert copies.counts is not None
    if draft.trees is not None:
        copied = [own[:count] for own, count in zip(copies.tokens.tolist(), copies.counts, strict=True)]
        return Draft.of_trees([DraftTree.of([own]) if own else tree for own, tree in zip(copied, draft.trees, strict=True)])
    width = max(draft.tokens.shape[1], copies.tokens.shape[1])
    ours, theirs = (torch.nn.functional.pad(d.tokens, (0, width - d.tokens.shape[1])) for d in (draft, copies))
    is_copied = torch.tensor(copies.counts, device=ours.device)[:, None] > 0
    counts = draft.counts or (draft.tokens.shape[1],) * len(copies.counts)
    return Draft(
        torch.where(is_copied, theirs, ours),
        draft.probabilities,
        tuple(copied or drafted for copied, drafted in zip(copies.counts, counts, strict=True)),
        one_hot=tuple(count > 0 for count in copies.counts),
    )
