"""DFlash-2's head: a walk over the best candidates of every slot."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hspec.drafters.config import SelectorConfig
from hspec.drafters.context import Chooser
from hspec.drafters.heads.causal import CausalHead, Logits, Walk


class PathSelector(CausalHead):
    """score(c) = unary(c) + <P[previous] * W_h h, S[c]> for the candidates c with the highest unary logits.

    All other tokens have probability zero, so q is exactly over the candidates. P is indexed by target ids, S by draft ids.
    """

    def __init__(self, config: SelectorConfig, vocab_size: int, draft_vocab_size: int, hidden_size: int):
        super().__init__()
        self.candidates = config.candidates
        self.predecessor = nn.Parameter(torch.randn(vocab_size, config.rank) * 0.02)
        self.successor = nn.Parameter(torch.randn(draft_vocab_size, config.rank) * 0.02)
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)

    def scores(self, unary: Tensor, candidates: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """``[..., C]``, draft ids ``[..., C]``, ``[..., hidden]``, target ids ``[...]`` -> ``[..., C]``."""
        path = self.predecessor[previous] * self.hidden_projection(hidden).to(self.predecessor.dtype)
        return unary + (self.successor[candidates] @ path[..., None]).squeeze(-1)

    def walk(self, hidden: Tensor, anchor_hidden: Tensor, base: Logits, choose: Chooser) -> Walk:
        unary = base(hidden).float()
        best, ids = unary.topk(self.candidates, dim=-1)

        def slot(j: int, previous: Tensor) -> Tensor:
            scores = self.scores(best[:, j], ids[:, j], hidden[:, j], previous).float()
            return torch.full_like(unary[:, j], float("-inf")).scatter(-1, ids[:, j], scores)

        return slot
