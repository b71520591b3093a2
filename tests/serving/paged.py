"""Paged caches made from tensors by position, written token by token: the slow, obvious way that layouts are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def cpu_vec_pages(keys: Tensor, values: Tensor, tables: Tensor, block: int, blocks: int) -> Tensor:
    """K and V ``[B, kv_heads, T, d]`` -> ``[blocks, kv_heads, block, 2 * d]``; what no token owns is NaN."""
    B, heads, T, d = keys.shape
    pages = torch.full((blocks, heads, block, 2 * d), float("nan"))
    flat = pages.view(blocks, heads, -1)
    for b in range(B):
        for t in range(T):
            own = int(tables[b, t // block])
            for j in range(d):
                flat[own, :, j * block + t % block] = keys[b, :, t, j]
                flat[own, :, d * block + (t % block) * d + j] = values[b, :, t, j]
    return pages


def flash_pages(keys: Tensor, values: Tensor, tables: Tensor, block: int, blocks: int) -> Tensor:
    """The same in FlashAttention's layout."""
    B, heads, T, d = keys.shape
    pages = torch.full((blocks, heads, block, 2 * d), float("nan"))
    for b in range(B):
        for t in range(T):
            pages[int(tables[b, t // block]), :, t % block, :d] = keys[b, :, t]
            pages[int(tables[b, t // block]), :, t % block, d:] = values[b, :, t]
    return pages


def shuffled_tables(batch: int, length: int, block: int, blocks: int) -> Tensor:
    """Distinct blocks in random order for every sequence, ``[batch, n]`` int32; never block 0, which vLLM keeps for nothing."""
    each = -(-length // block)
    order = torch.randperm(blocks - 1)[: batch * each] + 1
    return order.view(batch, each).to(torch.int32)
