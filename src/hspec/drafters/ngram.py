"""Prompt lookup: what followed the last tokens the last time they stood in the text. Nothing to train, nothing kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hspec.drafters.context import Chooser, Draft, DraftContext, greedy_chooser
from hspec.errors import UsageError
from hspec.targets.cache import KVView

NAME = "ngram"
"""What ``--drafter`` calls it."""


class NgramDrafter:
    """Drafts by looking up; its drafts are one-hot, so they are lossless at any temperature.

    Args:
        vocab_size: the target's; all of it can be drafted.
        max_draft: tokens a step at most; fewer where the text ends sooner behind what was found.
        longest, shortest: lengths of the suffixes that are looked for, the longest first.

    Raises:
        UsageError: lengths that are none.
    """

    taps: Sequence[int] = ()
    memory_shape = None
    reads_history = True

    def __init__(
        self, vocab_size: int, max_draft: int = 10, longest: int = 4, shortest: int = 2, device: torch.device | str = "cpu"
    ):
        if not 1 <= shortest <= longest or max_draft < 1:
            raise UsageError(
                f"n-grams of {shortest} to {longest} tokens, {max_draft} drafts: 1 <= shortest <= longest is needed"
            )
        self.max_draft = self.max_nodes = max_draft
        self.longest, self.shortest = longest, shortest
        self.draft_ids = torch.arange(vocab_size, device=device)

    def remember(self, taps: Tensor, following: Tensor, positions: Tensor, past: KVView | None) -> list[tuple[Tensor, Tensor]]:
        raise AssertionError("NgramDrafter keeps nothing")

    def propose(self, context: DraftContext, k: int, choose: Chooser = greedy_chooser) -> Draft:
        """Up to k tokens for each sequence; as wide as the longest of them."""
        assert context.history is not None
        found = [self.continuation(tokens, k) for tokens in context.history]
        width = max(1, *map(len, found))
        rows = [[*own, *[0] * (width - len(own))] for own in found]
        return Draft(torch.tensor(rows, device=self.draft_ids.device), None, tuple(map(len, found)))

    def continuation(self, tokens: Sequence[int], k: int) -> list[int]:
        """What followed the longest suffix of ``tokens`` where it last stood before, up to k tokens; none where it never did."""
        text = np.asarray(tokens, dtype=np.int64)
        for n in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
            starts = np.flatnonzero((windows == text[-n:]).all(axis=1))
            if starts.size:
                behind = int(starts[-1]) + n
                return text[behind : behind + k].tolist()
        return []
