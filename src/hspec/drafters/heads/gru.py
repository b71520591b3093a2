"""Domino's head: a GRU over the target's embeddings of the block's tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspec.drafters.config import GruConfig
from hspec.drafters.heads.causal import LowRankHead


class GruHead(LowRankHead):
    """e_j = SiLU(W_a [h_j; gru_j]), where gru_j has read the tokens before slot j; no biases.

    Args:
        embedding: the target's, frozen, ``[vocabulary, hidden]``.
    """

    embedding: Tensor

    def __init__(self, config: GruConfig, embedding: Tensor, draft_vocab_size: int, hidden_size: int):
        super().__init__()
        self.size = config.size
        self.register_buffer("embedding", embedding, persistent=False)
        self.cell = nn.GRUCell(embedding.shape[1], config.size, bias=False)
        self.w1 = nn.Linear(hidden_size + config.size, config.rank, bias=False)
        self.w2 = nn.Linear(config.rank, draft_vocab_size, bias=False)
        nn.init.zeros_(self.w2.weight)

    def start(self, blocks: int) -> Tensor:
        return self.cell.weight_hh.new_zeros(blocks, self.size)

    def step(self, state: Tensor, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(F.embedding(previous, self.embedding).to(state.dtype), state)
        return F.silu(self.w1(torch.cat((hidden.to(state.dtype), state), dim=-1))), state
