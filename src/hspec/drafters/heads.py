"""Small heads on the backbone: the fusion that seeds the state, the causal head, the confidence head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hspec.drafters.config import DrafterConfig
from hspec.drafters.norm import RMSNorm


class StateSeed(nn.Module):
    """Tapped hidden states of the last run token -> initial Mamba states.

    z = RMSNorm(W_fc [tap_1; ...; tap_F]);  S_init = reshape(W_seed z) to [heads, head_dim, state_dim], row-major.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        assert config.mamba is not None
        self.mamba, self.mode = config.mamba, config.seed_mode
        taps, hidden = len(config.taps), config.hidden_size
        self.tap_norms = (
            nn.ModuleList(RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(taps)) if config.fusion_norm else None
        )
        self.fc = nn.Linear(taps * hidden, config.fusion_rank, bias=False)
        self.norm = RMSNorm(config.fusion_rank, eps=config.rms_norm_eps)
        count = config.pattern.count("mamba") if config.seed_mode == "per_layer" else 1
        size = self.mamba.inner * self.mamba.state_dim
        self.projections = nn.ModuleList(nn.Linear(config.fusion_rank, size, bias=False) for _ in range(count))

    def fuse(self, taps: Tensor) -> Tensor:
        """``[..., F, hidden]`` -> z ``[..., fusion_rank]``."""
        if self.tap_norms is not None:
            taps = torch.stack([norm(taps[..., f, :]) for f, norm in enumerate(self.tap_norms)], dim=-2)
        return self.norm(self.fc(taps.flatten(-2)))

    def forward(self, taps: Tensor, mambas: int) -> list[Tensor | None]:
        """``[M, F, hidden]`` -> for each of the drafter's ``mambas`` sub-layers its ``[M, h, p, N]``, or None for zeros."""
        z = self.fuse(taps)
        shape = (z.shape[0], self.mamba.heads, self.mamba.head_dim, self.mamba.state_dim)
        states = [projection(z).view(shape) for projection in self.projections]
        if self.mode == "per_layer":
            return list(states)
        return [states[0] if self.mode == "shared" or i == 0 else None for i in range(mambas)]


class MarkovHead(nn.Module):
    """First-order bias on the draft logits: W_2 W_1[previous token]. W_1 is indexed by target ids."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int):
        super().__init__()
        self.w1 = nn.Embedding(vocab_size, rank)
        self.w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.w1.weight, std=0.02)
        nn.init.zeros_(self.w2.weight)

    def embed(self, previous: Tensor) -> Tensor:
        return self.w1(previous)

    def forward(self, previous: Tensor) -> Tensor:
        """Target ids ``[...]`` -> ``[..., draft vocabulary]``."""
        return self.w2(self.w1(previous))


class ConfidenceHead(nn.Module):
    """Predicts the acceptance probability of a slot from its hidden state and, if asked, the Markov embedding."""

    def __init__(self, hidden_size: int, markov_rank: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, markov: Tensor | None) -> Tensor:
        """``[..., hidden]``, ``[..., rank]`` -> logits ``[...]``."""
        features = hidden if markov is None else torch.cat((hidden, markov.to(hidden.dtype)), dim=-1)
        return self.proj(features).squeeze(-1)
