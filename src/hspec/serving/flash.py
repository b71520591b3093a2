"""Attention over pages with FlashAttention, merged with attention within the block. For CUDA; not run on a GPU yet.

The pages are read where they lie, by a kernel that knows block tables; nothing is gathered. All slots of a block see the same window
before the anchor, so they go to the kernel as further query heads of *one* row: a KV head is then read once for all slots, and the
kernel's own window, counted from that row, is exactly the drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hspec.drafters.context import PagedKV, Prefix
from hspec.serving.pages import PagedView, flash


class PagedKernel(Protocol):
    """Attention of one query row a sequence over its pages."""

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            q: ``[B, heads, d]``; heads that share a KV head lie together.
            keys, values: ``[blocks, block, kv_heads, d]``.
            tables: ``[B, n]`` int32.
            lengths: positions of each sequence that are seen, ``[B]`` int32, at least 1.
            window: of these the last so many; None for all.

        Returns:
            Outputs ``[B, heads, d]`` and log-sum-exp ``[heads, B]``.
        """


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Two softmaxes over disjoint keys as one: outputs ``[..., d]``, log-sum-exp ``[...]``."""
    total = torch.logaddexp(lse, other_lse)
    return out * (lse - total).exp()[..., None] + other * (other_lse - total).exp()[..., None]


def attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention within the block: q ``[B, KV, G, S, d]``, k and v ``[B, KV, S, d]`` -> fp32 outputs and log-sum-exp."""
    S = q.shape[3]
    scores = torch.einsum("bkgsd,bktd->bkgst", q.float(), k.float()) * q.shape[-1] ** -0.5
    if causal:
        visible = torch.ones(S, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - S)
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.einsum("bkgst,bktd->bkgsd", (scores - lse[..., None]).exp(), v.float()), lse


@dataclass(frozen=True)
class FlashLayer:
    """One layer's pages; see :class:`hspec.drafters.context.PagedKV`. ``keys``, ``values``: ``[blocks, block, kv_heads, d]``."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    kernel: PagedKernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, causal: bool) -> Tensor:
        B, _, H, S, d = q.shape
        KV = k.shape[2]
        grouped = q[:, 0].reshape(B, KV, H // KV, S, d)
        heads = grouped.reshape(B, H * S, d).to(self.keys.dtype)
        lengths, spans = prefix.stop[:, 0], prefix.stop[:, 0] - prefix.start[:, 0]
        # A window that cuts nobody's context off is none; one that does is the same for all whose context is that long.
        window = int(spans.max()) if bool((prefix.start > 0).any()) else None
        out, lse = self.kernel(heads, self.keys, self.values, self.tables, lengths.to(torch.int32), window)
        before = out.float().view(B, KV, H // KV, S, d)
        before_lse = lse.transpose(0, 1).float().reshape(B, KV, H // KV, S)
        within, within_lse = attend_block(grouped, k[:, 0], v[:, 0], causal)
        return merge(before, before_lse, within, within_lse).reshape(B, 1, H, S, d).to(v.dtype)


def flash_view(pages: dict[int, Tensor], tables: Tensor, lengths: Sequence[int], kernel: PagedKernel) -> PagedView:
    """As :func:`hspec.serving.pages.gathered_view`, with pages in FlashAttention's layout."""
    layers: dict[int, PagedKV] = {}
    for index, tensor in pages.items():
        keys, values = (side.transpose(1, 2) for side in flash(tensor))  # [blocks, block, kv_heads, d], as the kernel wants it
        layers[index] = FlashLayer(keys, values, tables, kernel)
    return PagedView(layers, tuple(lengths))


def vllm_kernel(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """vLLM's FlashAttention (see :class:`PagedKernel`)."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    out, lse = flash_attn_varlen_func(
        q=q,
        k=keys,
        v=values,
        max_seqlen_q=1,
        cu_seqlens_q=torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device),
        max_seqlen_k=int(lengths.max()),
        seqused_k=lengths,
        block_table=tables,
        causal=True,  # of one row: it sees all of its context
        window_size=[-1, -1] if window is None else [window - 1, 0],
        softmax_scale=q.shape[-1] ** -0.5,
        return_softmax_lse=True,
        fa_version=get_flash_attn_version(),
    )
    return out, lse
