"""Drafters for tests of the loop: one whose errors are chosen, and one that makes none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hspec.drafters.context import Chooser, Draft, DraftContext
from hspec.drafters.tree import DraftTree
from hspec.targets.target import Target

CERTAIN = 200.0
"""A logit that no noise and no penalty can beat."""


def all_in_turn(most: int, start: int = 0) -> Callable[[int], int]:
    """Every step's number of right drafts: ``start``, then 0..most over and over, whatever the position."""
    turns = itertools.count(start)
    return lambda position: next(turns) % (most + 1)


def random_plan(most: int, seed: int = 0, positions: int = 4096) -> Callable[[int], int]:
    """Anchor position -> how many drafts are right before the planted error, 0..most."""
    plan = torch.randint(0, most + 1, (positions,), generator=torch.Generator().manual_seed(seed)).tolist()
    return lambda position: plan[position]


class ReplayDrafter:
    """Knows texts beforehand, and goes wrong exactly where it is told to.

    It also checks what the loop hands to drafters: a text is recognised by the target's K of its tokens, and the tapped hidden
    states must be those of the token before the anchor.

    Args:
        texts: prompts with their continuations.
        right: anchor position -> how many drafts are right; the next one is wrong, those after it are right again.
        certainty: how far the planned token's logit stands above the noise. At temperature > 0 a small one gives a
            random q of full support, :data:`CERTAIN` one that is all but one-hot.
        draft_ids: ascending; None for the whole vocabulary. A planned token outside of it is drafted wrong.
        fixed: propose the planned tokens without asking the chooser, as drafters with one-hot q may; for an unknown text the
            first draft id, over and over.
    """

    def __init__(
        self,
        target: Target,
        texts: Sequence[Sequence[int]] = (),
        right: Callable[[int], int] = lambda position: 10**9,
        max_draft: int = 7,
        certainty: float = CERTAIN,
        draft_ids: Tensor | None = None,
        taps: Sequence[int] | None = None,
        fixed: bool = False,
        seed: int = 0,
    ):
        self.right, self.certainty, self.fixed = right, certainty, fixed
        self.max_draft = self.max_nodes = max_draft
        self.taps = sorted({1, len(target.layers)}) if taps is None else list(taps)
        self.draft_ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        generator = torch.Generator().manual_seed(seed)
        # A function of (position, token before), so that what is drafted depends on nothing else.
        self.noise = torch.randn(7, target.vocab_size, len(self.draft_ids), generator=generator)
        self.texts = [list(text) for text in texts]
        self.traces = [self._trace(target, text) for text in self.texts]
        self.seen: set[int] = set()
        """Right drafts planned so far, one entry for each number."""

    def _trace(self, target: Target, text: list[int]) -> tuple[list[Tensor], Tensor]:
        """Keys by layer ``[kv_heads, tokens, head_dim]`` and taps ``[tokens, taps, hidden]`` of a text run at once."""
        cache = target.new_cache(1, len(text))
        output = target.forward(torch.tensor([text]), cache, self.taps)
        return [keys[0] for keys in cache.keys], output.taps[0]

    memory_shape = None
    reads_history = False

    def propose(self, context: DraftContext, k: int, choose: Chooser) -> Draft:
        assert 1 <= k <= self.max_draft
        assert context.positions.shape == context.anchors.shape == (len(context.kv.lengths), 1)
        positions = context.positions[:, 0].tolist()
        assert tuple(positions) == context.kv.lengths, "the cache holds exactly the tokens before the anchor"
        planned = [self._planned(context, row, position, k) for row, position in enumerate(positions)]
        if self.fixed:
            return Draft(self.draft_ids[torch.tensor(planned)], None)
        previous = context.anchors[:, 0]
        tokens, distributions = [], []
        for slot in range(1, k + 1):
            logits = torch.stack([self.noise[(p + slot) % 7, t] for p, t in zip(positions, previous.tolist(), strict=True)])
            for row, plan in enumerate(planned):
                if plan:
                    logits[row, plan[slot - 1]] += self.certainty
            chosen, q = choose(slot, logits)
            previous = self.draft_ids[chosen]
            tokens.append(previous)
            distributions.append(q)
        one_hot = distributions[0] is None
        return Draft(torch.stack(tokens, 1), None if one_hot else torch.stack(distributions, 1))  # type: ignore[arg-type]

    def _planned(self, context: DraftContext, row: int, position: int, k: int) -> list[int]:
        """Draft ids for slots 1..k, or none where the row's text is not a known one."""
        text = self._recognise(context, row, position)
        if text is None:
            return [0] * k if self.fixed else []
        right = min(k, self.right(position))
        self.seen.add(right)
        ids = self.draft_ids.tolist()
        out = []
        for slot in range(1, k + 1):
            token = text[position + slot] if position + slot < len(text) else ids[0]
            known = token in ids
            draft = ids.index(token) if known else 0
            out.append((draft + 1) % len(ids) if known and slot == right + 1 else draft)
        return out

    def _recognise(self, context: DraftContext, row: int, position: int) -> list[int] | None:
        for text, (keys, taps) in zip(self.texts, self.traces, strict=True):
            if position >= len(text) or text[position] != int(context.anchors[row, 0]):
                continue
            # The first layer's K tells the tokens; the others must then agree.
            own = [k[row, :, :position] for k in context.kv.keys]
            if not torch.allclose(own[0], keys[0][:, :position], atol=1e-5):
                continue
            for mine, known in zip(own, keys, strict=True):
                torch.testing.assert_close(mine, known[:, :position], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(context.taps[row, 0], taps[position - 1], atol=1e-3, rtol=1e-4)
            return text
        return None


class SelfDrafter:
    """Drafts with the target itself, token by token: q is p, so that all is accepted at any temperature."""

    taps: Sequence[int] = ()
    memory_shape = None
    reads_history = False

    def __init__(self, target: Target, max_draft: int = 4):
        self.target, self.draft_ids = target, torch.arange(target.vocab_size)
        self.max_draft = self.max_nodes = max_draft

    def propose(self, context: DraftContext, k: int, choose: Chooser) -> Draft:
        lengths = list(context.kv.lengths)
        cache = self.target.new_cache(len(lengths), max(lengths) + k)
        cache.lengths = lengths
        for mine, theirs in zip([*cache.keys, *cache.values], [*context.kv.keys, *context.kv.values], strict=True):
            mine[:, :, : max(lengths)] = theirs[:, :, : max(lengths)]
        token, tokens, distributions = context.anchors, [], []
        for slot in range(1, k + 1):
            logits = self.target.logits(self.target.forward(token, cache).hidden[:, -1])
            cache.advance([1] * len(lengths))
            chosen, q = choose(slot, logits)
            token = chosen[:, None]
            tokens.append(chosen)
            distributions.append(q)
        one_hot = distributions[0] is None
        return Draft(torch.stack(tokens, 1), None if one_hot else torch.stack(distributions, 1))  # type: ignore[arg-type]


class ReplayTreeDrafter(ReplayDrafter):
    """The same with trees: the planned tokens are one branch among wrong ones, in shapes that go by the anchor's position.

    It goes right exactly as far as planned: a wrong token is no other branch's right one. Text that it does not know gets a
    tree of noise.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.max_nodes = 5 * self.max_draft
        self.depths: set[int] = set()
        """Of all trees so far."""

    def propose(self, context: DraftContext, k: int, choose: Chooser) -> Draft:
        assert 1 <= k <= self.max_draft and tuple(context.positions[:, 0].tolist()) == context.kv.lengths
        trees = [self._tree(context, row, position, k) for row, position in enumerate(context.kv.lengths)]
        self.depths |= {max(tree.row_depths) for tree in trees}
        return Draft.of_trees(trees)

    def _tree(self, context: DraftContext, row: int, position: int, k: int) -> DraftTree:
        plan = self._planned(context, row, position, k)
        if not plan:
            return DraftTree.of([[5, 6, 7][:k], [5, 8, 9][:k], [position % 4]])
        # The plan's own error is one above the right token; these are two and three above it.
        wrong = [[(token + above) % len(self.draft_ids) for token in plan] for above in (2, 3)]
        early, late = [*plan[:1], *wrong[0][1:]], [*plan[: k - 1], *wrong[0][k - 1 :]]
        shapes = [
            [plan],
            [wrong[0], plan],
            [wrong[1], early, plan, [*plan[:2], *wrong[1][2:]]],
            [late, wrong[0][:1], plan, early[:2]],
            [wrong[0][:2], wrong[1], early, late, plan],
        ]
        return DraftTree.of([candidate[:k] for candidate in shapes[position % len(shapes)]])
