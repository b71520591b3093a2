"""A repair of vLLM's CPU backend: sampling parameters of each request, given to each of its draft rows.

vLLM 0.32.0 converts the output to int64 before the C++ kernel writes to it, which is a copy for every other type. Temperatures
(and top-p, top-k) of verified rows are then whatever memory held before, for every speculative method. The wrapper around the kernel
is replaced before vLLM registers it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "_expand_kernel_impl"
"""In ``vllm.utils.cpu_triton_utils``."""


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's value to all of its rows; the names are those of the kernel that this stands in for.

    Args:
        output: ``[rows]``, written.
        input_val: ``[requests]``.
        cu_num_tokens: rows of the requests so far, ``[requests]``.
        replace_from, replace_to: a value that is replaced by another (temperature 0, by which logits cannot be divided).
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(values.repeat_interleave(counts).to(output.dtype))


def install(module: Any) -> None:
    """Replace the faulty wrapper in ``vllm.utils.cpu_triton_utils``; nothing happens where there is none of this name."""
    if hasattr(module, NAME):
        setattr(module, NAME, expand)


def installed(module: Any) -> bool:
    """Whether the wrapper is ours, or there is none to repair."""
    return getattr(module, NAME, expand) is expand
