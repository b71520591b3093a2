"""Drafter attention: queries from the block over the target's own K/V, read where they lie, and over the block itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hspec.drafters.config import AttentionConfig
from hspec.drafters.context import LayerKV, PagedKV, Prefix
from hspec.drafters.norm import RMSNorm
from hspec.drafters.rope import rotate


@dataclass
class BlockKV:
    """A block's own K and V so far, ``[B, N, kv_heads, slots, d]``; rotated."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add slots behind the others; gives all."""
        self.keys = keys if self.keys is None else torch.cat((self.keys, keys), dim=3)
        self.values = values if self.values is None else torch.cat((self.values, values), dim=3)
        return self.keys, self.values


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor | None,
    context_v: Tensor | None,
    context_mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """One softmax over the context and the block together; nothing is copied from the context or written to it.

    Args:
        q: ``[B, N, heads, S, d]``; k, v: ``[B, N, kv_heads, S_k, d]``: the block's own, rotated; the queries are those of its
            last S slots.
        context_k, context_v: ``[B, kv_heads, T, d]``, shared by the N blocks of a sequence; None for no context.
        context_mask: ``[B, N, T]`` bool, None where every block sees all T.
        causal: whether slot j sees slots <= j only.

    Returns:
        ``[B, N, heads, S, d]``.
    """
    B, N, H, S, d = q.shape
    KV, S_k = k.shape[2], k.shape[3]
    rows = H // KV * S  # the query heads that share a KV head, and their slots, as rows of one matrix
    q = q.reshape(B, N, KV, rows, d).transpose(1, 2) * d**-0.5  # [B, KV, N, rows, d]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, KV, N, S_k, d]
    scores = torch.matmul(q, k.transpose(-1, -2)).float()  # [B, KV, N, rows, S_k]
    if causal:
        visible = torch.ones(S, S_k, dtype=torch.bool, device=q.device).tril(S_k - S).repeat(H // KV, 1)
        scores = scores.masked_fill(~visible, float("-inf"))
    if context_k is None or context_v is None or context_k.shape[2] == 0:
        out = torch.matmul(scores.softmax(-1).to(v.dtype), v)
        return out.transpose(1, 2).reshape(B, N, H, S, d)
    T = context_k.shape[2]
    # A batch of one view per row keeps the slice of the cache a view: reshaping [B, KV, T, d] would copy it.
    # The few queries take the cache's type, not the cache theirs: a cast of the window would be a copy of it.
    context = torch.matmul(q.reshape(B, KV, N * rows, d).to(context_k.dtype), context_k.transpose(-1, -2))
    context = context.view(B, KV, N, rows, T).float()
    if context_mask is not None:
        context = context.masked_fill(~context_mask[:, None, :, None, :], float("-inf"))
    weights = torch.cat((context, scores), dim=-1).softmax(-1)
    out = torch.matmul(weights[..., T:].to(v.dtype), v)
    over_context = torch.matmul(weights[..., :T].reshape(B, KV, N * rows, T).to(context_v.dtype), context_v)
    out = out + over_context.view_as(out).to(v.dtype)
    return out.transpose(1, 2).reshape(B, N, H, S, d)


class PrefixAttention(nn.Module):
    """``[B, N, S, hidden]`` -> the same, over K/V of what lies before the anchor and over the block itself.

    Args:
        index: which of the drafter's attention sub-layers, for settings that have an entry for each.
        input_size: width of what is projected to q, k and v, where it is not ``hidden_size``.
    """

    def __init__(self, hidden_size: int, config: AttentionConfig, index: int, eps: float, input_size: int | None = None):
        super().__init__()
        self.config = config
        self.window, self.causal = config.window_of(index), config.causal_of(index)
        c, width = config, hidden_size if input_size is None else input_size
        self.q_proj = nn.Linear(width, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, eps=eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, eps=eps) if c.qk_norm else nn.Identity()

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K and V of ``x`` ``[..., S, width]`` at the positions of ``rope``: ``[..., kv_heads, S, d]``."""
        c = self.config
        cos, sin = (t.unsqueeze(-3).to(x.dtype) for t in rope)
        split = (*x.shape[:-1], c.kv_heads, c.head_dim)
        k = rotate(self.k_norm(self.k_proj(x).view(split)).transpose(-3, -2), cos, sin)
        v = self.v_proj(x).view(split).transpose(-3, -2)
        return k.to(v.dtype), v

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv: LayerKV | None,
        anchors: Tensor,
        block: BlockKV | None = None,
    ) -> Tensor:
        """Attend from every slot of every block.

        Args:
            rope: cos, sin ``[B, N, S, rotary]`` of the slots' positions.
            kv: context K/V ``[B, kv_heads, capacity, d]`` or pages, None for the block alone.
            anchors: the context ends before this position, ``[B, N]``.
            block: K/V of the slots before these, for blocks that grow slot by slot; takes up theirs too.
        """
        c = self.config
        B, N, S, _ = x.shape
        cos, sin = (t[:, :, None].to(x.dtype) for t in rope)
        q = rotate(self.q_norm(self.q_proj(x).view(B, N, S, -1, c.head_dim)).transpose(2, 3), cos, sin)
        k, v = self.project(x, rope)
        if block is not None:
            k, v = block.extend(k, v)
        out = self._over(q.to(v.dtype), k, v, kv, Prefix.before(anchors, self.window))
        return self.o_proj(out.transpose(2, 3).reshape(B, N, S, c.heads * c.head_dim))

    def _over(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV | None, prefix: Prefix) -> Tensor:
        if kv is None:
            return attend(q, k, v, None, None, None, self.causal)
        if isinstance(kv, PagedKV):
            return kv.attend(q, k, v, prefix, self.causal)
        context_k, context_v = kv
        if q.shape[1] > 1:  # many blocks a sequence (training): one product with the whole sequence, masked
            length = int(prefix.stop.max())
            mask = prefix.mask(length)
            return attend(q, k, v, context_k[:, :, :length], context_v[:, :, :length], mask, self.causal)
        parts = []
        for row in range(q.shape[0]):  # one block a sequence (decoding): exactly the window, as a view
            one = slice(row, row + 1)
            window = slice(int(prefix.start[row, 0]), int(prefix.stop[row, 0]))
            parts.append(
                attend(q[one], k[one], v[one], context_k[one, :, window], context_v[one, :, window], None, self.causal)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
