"""Tapped hidden states, fused: the seed of the Mamba states, or the features that context K/V are projected from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hspec.drafters.config import ParallelConfig
from hspec.drafters.norm import RMSNorm


class Fusion(nn.Module):
    """z = RMSNorm(W_fc [tap_1; ...; tap_F]), each tap with a norm of its own before it if asked."""

    def __init__(self, taps: int, hidden_size: int, rank: int, eps: float, tap_norms: bool = False):
        super().__init__()
        self.tap_norms = nn.ModuleList(RMSNorm(hidden_size, eps=eps) for _ in range(taps)) if tap_norms else None
        self.fc = nn.Linear(taps * hidden_size, rank, bias=False)
        self.norm = RMSNorm(rank, eps=eps)

    def fuse(self, taps: Tensor) -> Tensor:
        """``[..., F, hidden]`` -> z ``[..., rank]``."""
        if self.tap_norms is not None:
            taps = torch.stack([norm(taps[..., f, :]) for f, norm in enumerate(self.tap_norms)], dim=-2)
        return self.norm(self.fc(taps.flatten(-2)))


class StateSeed(Fusion):
    """Taps of the last run token -> initial Mamba states: S_init = reshape(W_seed z) to [heads, head_dim, state_dim], row-major."""

    def __init__(self, config: ParallelConfig):
        assert config.mamba is not None
        super().__init__(len(config.taps), config.hidden_size, config.fusion_rank, config.rms_norm_eps, config.fusion_norm)
        self.mamba, self.mode = config.mamba, config.seed_mode
        count = config.pattern.count("mamba") if config.seed_mode == "per_layer" else 1
        size = self.mamba.inner * self.mamba.state_dim
        self.projections = nn.ModuleList(nn.Linear(config.fusion_rank, size, bias=False) for _ in range(count))

    def forward(self, taps: Tensor, mambas: int) -> list[Tensor | None]:
        """``[M, F, hidden]`` -> for each of the drafter's ``mambas`` sub-layers its ``[M, h, p, N]``, or None for zeros."""
        z = self.fuse(taps)
        shape = (z.shape[0], self.mamba.heads, self.mamba.head_dim, self.mamba.state_dim)
        states = [projection(z).view(shape) for projection in self.projections]
        if self.mode == "per_layer":
            return list(states)
        return [states[0] if self.mode == "shared" or i == 0 else None for i in range(mambas)]
