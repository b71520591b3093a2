"""RMSNorm that computes in its weight's type, whatever type a bf16 product hands it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension; input of any float type, output of the weight's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps)
