"""The confidence head: how likely a slot is to be accepted."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """Predicts the acceptance probability of a slot from its hidden state and, if asked, the Markov embedding."""

    def __init__(self, hidden_size: int, markov_rank: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, markov: Tensor | None) -> Tensor:
        """``[..., hidden]``, ``[..., rank]`` -> logits ``[...]``."""
        features = hidden if markov is None else torch.cat((hidden, markov.to(hidden.dtype)), dim=-1)
        return self.proj(features).squeeze(-1)
