"""What a causal head is: the part that lets a slot depend on the tokens drafted before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hspec.drafters.context import Chooser

Logits = Callable[[Tensor], Tensor]
"""``[..., hidden]`` -> ``[..., draft vocabulary]``: the shared LM head."""
Walk = Callable[[int, Tensor], Tensor]
"""Index of a slot (from 0) and the token before it ``[M]`` (target ids) -> its logits ``[M, draft vocabulary]`` fp32.
Called once for each slot, in their order."""


class CausalHead(nn.Module, ABC):
    """Turns the slots' hidden states into logits, one slot after the other."""

    @abstractmethod
    def walk(self, hidden: Tensor, anchor_hidden: Tensor, base: Logits, choose: Chooser) -> Walk:
        """Begin M blocks.

        Args:
            hidden: the drafted slots' ``[M, k, hidden]``. anchor_hidden: slot 0's ``[M, hidden]``.
            base: the LM head. choose: for a draw of the head's own, if it has one.
        """


class LowRankHead(CausalHead):
    """Heads that add W_2 e_j to the logits; e_j ``[rank]`` is of the slot's hidden state and the tokens before it.

    Training and drafting share :meth:`step`; the low rank is what lets the objective handle all slots without their logits.
    """

    w2: nn.Linear

    def start(self, blocks: int) -> Any:
        """The state before the first slot of ``blocks`` blocks; None for heads that have none."""
        return None

    @abstractmethod
    def step(self, state: Any, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Any]:
        """One slot: state, ``[M, hidden]``, ``[M]`` target ids -> e_j ``[M, rank]``, the next state."""

    def lead(self, state: Any, anchor_hidden: Tensor | None, anchors: Tensor) -> Any:
        """What a slot 0 that drafts nothing does to the first state: ``[M, hidden]``, target ids ``[M]``. Most heads skip it."""
        return state

    def features(self, hidden: Tensor, previous: Tensor, anchor_hidden: Tensor | None = None) -> Tensor:
        """All slots, each behind its true token: ``[M, k, hidden]``, ``[M, k]``, slot 0's ``[M, hidden]`` -> ``[M, k, rank]``."""
        state, out = self.lead(self.start(hidden.shape[0]), anchor_hidden, previous[:, 0]), []
        for j in range(hidden.shape[1]):
            e, state = self.step(state, hidden[:, j], previous[:, j])
            out.append(e)
        return torch.stack(out, dim=1)

    def walk(self, hidden: Tensor, anchor_hidden: Tensor, base: Logits, choose: Chooser) -> Walk:
        logits = base(hidden).float()
        state = self.start(hidden.shape[0])

        def slot(j: int, previous: Tensor) -> Tensor:
            nonlocal state
            if j == 0:
                state = self.lead(state, anchor_hidden, previous)
            e, state = self.step(state, hidden[:, j], previous)
            return logits[:, j] + self.w2(e).float()

        return slot
