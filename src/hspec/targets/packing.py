"""Module swaps that make a frozen model fast on a CPU without changing what it computes.

A plain fp32 ``nn.Linear`` re-lays its weight for every call, and takes twice as long for two rows as for one. oneDNN can
hold the weight in its own layout, packed once. Packed without a hint of the row count it is the fastest for any number of
rows, and two rows or more each get the same result in every bit however many they are. A single row does too up to 1024
inputs; above, oneDNN sums it in another order (measured with torch 2.13 on AVX-512), so it is run as four copies of itself.
Verification of k + 1 rows then gives exactly the linears of one-row decoding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAME_ALONE = 1024
"""Inputs up to which oneDNN gives a single row what it gives it among others."""
COPIES = 4
"""Of a single row above that. Four rows take no longer than one, and less than two: 0.29 ms against 0.34 and 0.49 at best for 1536
inputs and 576 outputs, one thread, the weight out of cache. Halving the inputs instead, for two products whose results are added,
keeps rows independent too, but all calls pay for it (five rows: 0.28 instead of 0.20 ms)."""


class PackedLinear(nn.Module):
    """An inference-only fp32 linear layer in oneDNN's own weight layout; a row's result is free of its neighbours, bit for bit."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        if self.in_features > SAME_ALONE and x.numel() == self.in_features:
            return self._product(x.reshape(1, -1).expand(COPIES, -1))[:1].view(*x.shape[:-1], self.out_features)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


class PackedHalfLinear(PackedLinear):
    """The same with its weight kept, and multiplied, in bf16: half the memory traffic, for a drafter, whose values need not be
    exact. Takes and gives fp32. Up to 17 rows a row's result is free of its neighbours here too (measured; of 40 not for all sizes)."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().bfloat16(), None)
        self.bias = None if self.bias is None else self.bias.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x.bfloat16()).float()


class HalfLinear(nn.Module):
    """A frozen linear layer that multiplies in bf16 and gives back its input's type: for running a target while training,
    on processors with bf16 products. Residual stream, K/V and logits stay in fp32."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().bfloat16(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight, self.bias).to(x.dtype)


class FusedRMSNorm(nn.Module):
    """RMSNorm as one kernel; ``transformers`` spends five on it."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def can_pack(module: nn.Module) -> bool:
    weight = next(module.parameters(), None)
    return (
        weight is not None
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack_linears(module: nn.Module, kind: type[PackedLinear] = PackedLinear) -> int:
    """Replace every fp32 CPU linear below ``module`` by a packed one; returns how many.

    The original weights are released, except where another module shares them (tied embeddings).
    """
    if not can_pack(module):
        return 0
    return _swap(module, lambda child: kind(child) if type(child) is nn.Linear else None)


def halve_linears(module: nn.Module) -> int:
    """Replace every linear below ``module`` by one that multiplies in bf16; returns how many."""
    return _swap(module, lambda child: HalfLinear(child) if type(child) is nn.Linear else None)


def has_bf16_products(device: torch.device) -> bool:
    """Whether bf16 products are faster than fp32 ones on this device (a CPU needs AVX512-BF16 or AMX)."""
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def fuse_norms(module: nn.Module) -> int:
    """Replace RMSNorms of the Llama kind (weight times normalised input, fp32) by the fused kernel; returns how many."""

    def fused(child: Any) -> nn.Module | None:
        plain = type(child).__name__ in ("LlamaRMSNorm", "Qwen3RMSNorm", "Qwen2RMSNorm", "MistralRMSNorm")
        return FusedRMSNorm(child.weight, child.variance_epsilon) if plain and child.weight.dtype == torch.float32 else None

    return _swap(module, fused)


def _swap(module: nn.Module, replace) -> int:  # type: ignore[no-untyped-def]
    count = 0
    for name, child in module.named_children():
        new = replace(child)
        if new is not None:
            setattr(module, name, new)
            count += 1
        else:
            count += _swap(child, replace)
    return count
