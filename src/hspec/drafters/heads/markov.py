"""DSpark's Markov head in its three variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hspec.drafters.config import MarkovConfig
from hspec.drafters.heads.causal import LowRankHead


class MarkovHead(LowRankHead):
    """First-order bias on the draft logits: W_2 e, where e = W_1[previous token] (W_1 is indexed by target ids)."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int):
        super().__init__()
        self.w1 = nn.Embedding(vocab_size, rank)
        self.w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.w1.weight, std=0.02)
        nn.init.zeros_(self.w2.weight)

    def embed(self, previous: Tensor) -> Tensor:
        """Target ids ``[...]`` -> ``[..., rank]``."""
        return self.w1(previous)

    def step(self, state: Any, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Any]:
        return self.w1(previous), state

    def features(self, hidden: Tensor, previous: Tensor, anchor_hidden: Tensor | None = None) -> Tensor:
        return self.w1(previous)


class GatedMarkovHead(MarkovHead):
    """e = sigmoid(G [h; W_1[previous]]) * W_1[previous]: the slot says how much the token before matters."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int):
        super().__init__(vocab_size, draft_vocab_size, rank)
        self.gate = nn.Linear(hidden_size + rank, rank)

    def step(self, state: Any, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Any]:
        return self.features(hidden, previous), state

    def features(self, hidden: Tensor, previous: Tensor, anchor_hidden: Tensor | None = None) -> Tensor:
        e = self.w1(previous)
        return torch.sigmoid(self.gate(torch.cat((hidden.to(e.dtype), e), dim=-1))) * e


class RecurrentMarkovHead(MarkovHead):
    """A gated state s over the block's tokens: (g, c, o) of one linear on [s; e; h];
    s' = sigmoid(g) s + (1 - sigmoid(g)) tanh c, and tanh o goes to W_2. s starts at zero.

    Args:
        leads: whether the block's slot 0 drafts nothing; the state has read it all the same, behind the anchor as slot 1.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int, leads: bool = False):
        super().__init__(vocab_size, draft_vocab_size, rank)
        self.leads = leads
        self.joint = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, blocks: int) -> Tensor:
        return self.joint.bias.new_zeros(blocks, self.w1.embedding_dim)

    def step(self, state: Tensor, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        e = self.w1(previous)
        g, c, o = self.joint(torch.cat((state, e, hidden.to(e.dtype)), dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(g)
        return torch.tanh(o), keep * state + (1 - keep) * torch.tanh(c)

    def lead(self, state: Tensor, anchor_hidden: Tensor | None, anchors: Tensor) -> Tensor:
        if not self.leads:
            return state
        assert anchor_hidden is not None
        return self.step(state, anchor_hidden, anchors)[1]

    def features(self, hidden: Tensor, previous: Tensor, anchor_hidden: Tensor | None = None) -> Tensor:
        return LowRankHead.features(self, hidden, previous, anchor_hidden)


def markov_head(
    config: MarkovConfig, vocab_size: int, draft_vocab_size: int, hidden_size: int, leads: bool = False
) -> MarkovHead:
    """The head of the variant asked for; ``leads``: see :class:`RecurrentMarkovHead`."""
    if config.variant == "vanilla":
        return MarkovHead(vocab_size, draft_vocab_size, config.rank)
    if config.variant == "gated":
        return GatedMarkovHead(vocab_size, draft_vocab_size, config.rank, hidden_size)
    return RecurrentMarkovHead(vocab_size, draft_vocab_size, config.rank, hidden_size, leads)
