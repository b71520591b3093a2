"""The two-tap dynamic convolution of DFlash-2: slots of a block see their neighbour before attention or MLP, and behind it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hspec.drafters.config import ConvolutionConfig


class BlockConvolution(nn.Module):
    """Filters what enters a sub-layer (side 0) and what leaves it (side 1).

    out_t = sum over taps i of (base[side, i] + delta[side, i, t, group]) * x_{t - i}, with zeros before the block. ``delta`` of
    both sides is projected from the normed input of the sub-layer. Identity at the start.
    """

    def __init__(self, hidden_size: int, config: ConvolutionConfig):
        super().__init__()
        self.kernel, self.group = config.kernel, config.group
        self.base_kernel = nn.Parameter(torch.zeros(2, config.kernel, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * config.kernel * (hidden_size // config.group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, normed: Tensor) -> Callable[[Tensor, int], Tensor]:
        """The two sides' filters of a sub-layer with this normed input ``[..., S, hidden]``: ``filters(x, side)``, shape of x."""
        deltas = self.kernel_projection(normed).unflatten(-1, (2, self.kernel, -1))  # [..., S, side, tap, hidden / group]

        def filtered(x: Tensor, side: int) -> Tensor:
            out = torch.zeros_like(x)
            for tap in range(min(self.kernel, x.shape[-2])):
                shifted = x if tap == 0 else nn.functional.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
                weight = self.base_kernel[side, tap] + deltas[..., side, tap, :].repeat_interleave(self.group, dim=-1)
                out = out + weight.to(x.dtype) * shifted
            return out

        return filtered
