"""A drafter that stops where it doubts: drafts that hardly stand a chance are not put to the test.

Every draft costs a row of the target's forward, whether it stands or not. With one request that row is almost free; where many share a
forward it is not (docs/serving.md), and there the confidence head says which drafts are worth theirs.

It stays lossless, because how sure the drafter is of a slot follows from the tokens before it, not from the token that it then
picks. (Leave out a draft for what it *is*, and the others of its slot are emitted too often: tests/decoding/test_engine.py
has a drafter that does.)
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hspec.drafters.context import Chooser, Draft, DraftContext, greedy_chooser
from hspec.drafters.drafter import Drafter
from hspec.errors import UsageError
from hspec.targets.cache import KVView

SUFFIX = "+sure"
"""Behind a drafter's folder or name, with the least chance: ``smollm2+sure0.4``."""


class WhileSure:
    """Drafts of each sequence as long as they stand with a chance of ``least`` or more, all before them included.

    Args:
        drafter: one with a confidence head.
        least: above 0 and below 1.

    Raises:
        UsageError: the drafter has no such head.
    """

    def __init__(self, drafter: Drafter, least: float):
        if drafter.confidence is None:
            raise UsageError(no_confidence(drafter.config.method))
        drafter.says_chances = True
        self.drafter, self.least = drafter, least
        self.taps, self.draft_ids, self.memory_shape = drafter.taps, drafter.draft_ids, drafter.memory_shape
        self.max_draft, self.max_nodes = drafter.max_draft, drafter.max_nodes
        self.reads_history, self.embedding = drafter.reads_history, drafter.embedding

    def remember(self, taps: Tensor, following: Tensor, positions: Tensor, past: KVView | None) -> list[tuple[Tensor, Tensor]]:
        return self.drafter.remember(taps, following, positions, past)

    def propose(self, context: DraftContext, k: int, choose: Chooser = greedy_chooser) -> Draft:
        """Up to ``k`` tokens for each sequence, none where it doubts the first."""
        draft = self.drafter.propose(context, k, choose)
        assert draft.chances is not None
        return replace(draft, counts=tuple((draft.chances >= self.least).sum(1).tolist()))


def no_confidence(method: str) -> str:
    """Why a drafter cannot have ``+sure``, as a sentence."""
    return f"this drafter ({method}) has no confidence head, so it cannot say how sure it is: leave {SUFFIX} out"
