"""DBLAST's head: one latent category for a block, so that slots drafted in parallel still agree with each other."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hspec.drafters.config import LatentConfig
from hspec.drafters.context import Chooser
from hspec.drafters.heads.causal import CausalHead, Logits, Walk


class LatentHead(CausalHead):
    """h_{j,z} = h_j + W_up (SiLU(W_down h_j) * e_z); z is drawn once a block from a prior on the anchor's hidden state.

    Given z the slots are independent, and q is the conditional distribution: that keeps the acceptance rule exact.
    """

    def __init__(self, config: LatentConfig, hidden_size: int):
        super().__init__()
        self.values = config.values
        self.prior = nn.Linear(hidden_size, config.values)
        self.down = nn.Linear(hidden_size, config.rank, bias=False)
        self.codes = nn.Embedding(config.values, config.rank)
        self.up = nn.Linear(config.rank, hidden_size, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def shift(self, hidden: Tensor, z: Tensor) -> Tensor:
        """``[M, k, hidden]``, ``[M]`` -> ``[M, k, hidden]`` under that category."""
        return hidden + self.up(F.silu(self.down(hidden)) * self.codes(z)[:, None]).to(hidden.dtype)

    def walk(self, hidden: Tensor, anchor_hidden: Tensor, base: Logits, choose: Chooser) -> Walk:
        z = choose.latent(self.prior(anchor_hidden).float())
        logits = base(self.shift(hidden, z)).float()
        return lambda j, previous: logits[:, j]
