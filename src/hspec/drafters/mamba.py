"""The Mamba-2 mixer of a block: seeded by the target, computed at once.

Two ways to run the same recurrence: :func:`scan_dual` (fast, a few small batched products) and :func:`scan_recurrent` (slow
and obvious, the oracle of the tests). Formulas: Dao and Gu, "Transformers are SSMs" (2024), for the duality.

Shapes: M blocks, S slots, h heads of size p, G groups, N state dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspec.drafters.config import MambaConfig
from hspec.drafters.norm import RMSNorm

GATED_NORM_EPS = 1e-5


def scan_recurrent(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> Tensor:
    """S_t = exp(dt_t A) S_{t-1} + dt_t x_t (outer) B_t;  y_t = S_t C_t + D x_t, step by step.

    Args:
        x: ``[M, S, h, p]``. dt: ``[M, S, h]``, positive. a: ``[h]``, negative. b, c: ``[M, S, G, N]``. d: ``[h]``.
        state: ``[M, h, p, N]``, the state before the first slot.

    Returns:
        ``[M, S, h, p]``.
    """
    per_group = x.shape[2] // b.shape[2]
    outputs = []
    for t in range(x.shape[1]):
        b_t, c_t = (v[:, t].repeat_interleave(per_group, dim=1)[:, :, None, :] for v in (b, c))
        decay = torch.exp(dt[:, t] * a)[..., None, None]
        state = decay * state + dt[:, t, :, None, None] * x[:, t, :, :, None] * b_t
        outputs.append((state * c_t).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(outputs, dim=1)


def scan_dual(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor | None) -> Tensor:
    """The same as :func:`scan_recurrent` in its quadratic form, for short blocks.

    y_t = exp(cum_t) S_init C_t + sum over s <= t of (C_t . B_s) exp(cum_t - cum_s) dt_s x_s + D x_t,  cum = cumsum(dt A).
    ``state`` None means zeros.
    """
    M, S, h, _ = x.shape
    G, N = b.shape[2:]
    cum = torch.cumsum(dt * a, dim=1).transpose(1, 2)  # [M, h, S]
    causal = torch.ones(S, S, dtype=torch.bool, device=x.device).tril()
    decay = (cum[..., :, None] - cum[..., None, :]).masked_fill(~causal, float("-inf")).exp()  # [M, h, t, s]
    scores = torch.matmul(c.transpose(1, 2), b.permute(0, 2, 3, 1))  # [M, G, t, s]
    scores = scores[:, :, None].expand(M, G, h // G, S, S).reshape(M, h, S, S)
    weights = scores * decay * dt.transpose(1, 2)[:, :, None, :]
    y = torch.matmul(weights, x.transpose(1, 2))  # [M, h, t, p]
    if state is not None:
        c_heads = c.permute(0, 2, 3, 1)[:, :, None].expand(M, G, h // G, N, S).reshape(M, h, N, S)
        y = y + torch.matmul(state, c_heads).transpose(2, 3) * cum.exp()[..., None]
    return y.transpose(1, 2) + d[:, None] * x


class MambaMixer(nn.Module):
    """``[M, S, hidden]`` and an initial state ``[M, h, p, N]`` -> ``[M, S, hidden]``. The scan runs in fp32."""

    def __init__(self, hidden_size: int, config: MambaConfig):
        super().__init__()
        self.config = config
        c = config
        self.in_proj = nn.Linear(hidden_size, c.inner + c.conv_channels + c.heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(c.conv_channels, c.conv_kernel))
        self.conv_bias = nn.Parameter(torch.zeros(c.conv_channels))
        self.A_log = nn.Parameter(torch.log(torch.arange(1, c.heads + 1, dtype=torch.float32)))
        self.D = nn.Parameter(torch.ones(c.heads))
        self.dt_bias = nn.Parameter(torch.zeros(c.heads))
        self.norm = RMSNorm(c.inner, eps=GATED_NORM_EPS)
        self.out_proj = nn.Linear(c.inner, hidden_size, bias=False)
        nn.init.uniform_(self.conv_weight, -(c.conv_kernel**-0.5), c.conv_kernel**-0.5)

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        c = self.config
        M, S, _ = x.shape
        gate, xbc, dt = self.in_proj(x).float().split([c.inner, c.conv_channels, c.heads], dim=-1)
        xbc = F.silu(self._convolve(xbc))
        inner, b, cc = xbc.split([c.inner, c.groups * c.state_dim, c.groups * c.state_dim], dim=-1)
        y = scan_dual(
            inner.reshape(M, S, c.heads, c.head_dim),
            F.softplus(dt + self.dt_bias.float()),
            -torch.exp(self.A_log.float()),
            b.reshape(M, S, c.groups, c.state_dim),
            cc.reshape(M, S, c.groups, c.state_dim),
            self.D.float(),
            None if state is None else state.float(),
        ).reshape(M, S, c.inner)
        return self.out_proj(self.norm(y * F.silu(gate)))

    def _convolve(self, xbc: Tensor) -> Tensor:
        """Causal depthwise convolution with zeros before the block: no convolution state is carried over."""
        kernel = self.config.conv_kernel
        weight = self.conv_weight.float()
        padded = F.pad(xbc, (0, 0, kernel - 1, 0))
        S = xbc.shape[1]
        out = self.conv_bias.float() + padded[:, kernel - 1 :] * weight[:, -1]
        for tap in range(kernel - 1):
            out = out + padded[:, tap : tap + S] * weight[:, tap]
        return out
