"""K/V in vLLM's pages, the target's or a drafter's own, read where they lie. Nothing here knows vLLM: tensors in, tensors out.

A layer's cache is ``[blocks, kv_heads, block, 2 * d]``; a block table gives each sequence's blocks in order of position. How K and V
share a block's memory is the backend's *layout*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hspec.drafters.attention import attend
from hspec.drafters.context import PagedKV, Prefix

Layout = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Pages ``[blocks, kv_heads, block, 2 * d]`` -> views K and V, ``[blocks, kv_heads, block, d]`` each."""

Writer = Callable[[Tensor, Tensor, Tensor], None]
"""Keys and values ``[tokens, kv_heads, d]`` to slots ``[tokens]`` (block id times block, plus place): vLLM's own."""


def cpu_vec(pages: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's CPU attention, kernels "vec" and "vec16": of each head's block first K, *transposed* ``[d, block]``, then V."""
    blocks, heads, block, both = pages.shape
    halves = pages.view(blocks, heads, 2, block * (both // 2))
    keys = halves[:, :, 0].view(blocks, heads, both // 2, block).transpose(2, 3)
    return keys, halves[:, :, 1].view(blocks, heads, block, both // 2)


def flash(pages: Tensor) -> tuple[Tensor, Tensor]:
    """FlashAttention's: each token's K, then its V."""
    keys, values = pages.chunk(2, dim=-1)
    return keys, values


LAYOUTS: dict[str, Layout] = {"CPU_ATTN/vec": cpu_vec, "CPU_ATTN/vec16": cpu_vec, "FLASH_ATTN": flash}
"""By name of the backend, on a CPU with that of its kernels behind it."""


def gather(side: Tensor, table: Tensor, start: int, stop: int) -> Tensor:
    """Positions ``start .. stop`` of one sequence, copied from its blocks: ``[kv_heads, stop - start, d]``.

    Args:
        side: K or V of a layout, ``[blocks, kv_heads, block, d]``.
        table: the sequence's block ids, ``[n]``; what lies behind those that ``stop`` needs is not looked at.
    """
    block = side.shape[2]
    first, last = start // block, -(-stop // block)
    rows = side[table[first:last].long()].transpose(0, 1).flatten(1, 2)  # [kv_heads, blocks * block, d]
    return rows[:, start - first * block : stop - first * block]


@dataclass(frozen=True)
class GatheredLayer:
    """One layer for attention without a paged kernel: each sequence's window is gathered for the step, and dropped.

    ``keys``, ``values``: a layout's views; ``tables``: ``[B, n]``.
    """

    keys: Tensor
    values: Tensor
    tables: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, causal: bool) -> Tensor:
        """See :class:`hspec.drafters.context.PagedKV`."""
        parts = []
        for row in range(q.shape[0]):
            one = slice(row, row + 1)
            start, stop = int(prefix.start[row, 0]), int(prefix.stop[row, 0])
            keys, values = (gather(side, self.tables[row], start, stop)[None] for side in (self.keys, self.values))
            parts.append(attend(q[one], k[one], v[one], keys, values, None, causal))
        return torch.cat(parts)


@dataclass(frozen=True)
class PagedView:
    """K/V of a step's B sequences (see :class:`hspec.drafters.context.KVSource`)."""

    layers: dict[int, PagedKV]
    """Those that the drafter reads."""
    lengths: tuple[int, ...]

    def layer(self, index: int) -> PagedKV:
        return self.layers[index]


def gathered_view(pages: dict[int, Tensor], layout: Layout, tables: Tensor, lengths: Sequence[int]) -> PagedView:
    """
    Args:
        pages: by layer.
        tables: ``[B, n]``.
        lengths: of each sequence the positions that are valid.
    """
    layers: dict[int, PagedKV] = {index: GatheredLayer(*layout(tensor), tables) for index, tensor in pages.items()}
    return PagedView(layers, tuple(lengths))


@dataclass
class Pages:
    """The caches of the layers that a drafter reads, by index, and their layout; empty for a drafter that reads none."""

    layers: dict[int, Tensor] = field(default_factory=dict)
    layout: Layout = flash
