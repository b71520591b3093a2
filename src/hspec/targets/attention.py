"""The target's attention over the preallocated cache, registered with transformers under the name ``hspec``.

transformers hands every decoder layer's rotated q, k, v to the registered function; this one knows that slot p of the
cache is position p, that rows of a batch have their own lengths, and that some layers see a window only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "hspec"


@dataclass
class AttentionRows:
    """Which cache rows this forward's queries may see; made once a forward, shared by its layers.

    ``lengths[b]`` tokens of row b lie in the cache; ``count`` queries stand behind them, at positions
    ``lengths[b] .. lengths[b] + count - 1``.
    """

    lengths: list[int]
    count: int
    exact: bool = True
    """Whether rows of different lengths are handled one by one, so that none depends on its neighbours in any bit. On a CPU
    that is also the faster way (each row reads its own length only); on a GPU one masked call for all is."""
    _masks: dict[tuple[object, ...], Tensor | None] = field(default_factory=dict)

    def mask(self, length: int, window: int | None, groups: int, like: Tensor) -> Tensor | None:
        """Additive mask ``[groups * count, length + count]`` of one row, or None where everything is visible."""
        key = (length, window, groups)
        if key not in self._masks:
            self._masks[key] = self._build(length, window, groups, like)
        return self._masks[key]

    def batch_mask(self, window: int | None, groups: int, like: Tensor) -> Tensor:
        """Additive mask ``[batch, 1, groups * count, longest + count]`` of all rows."""
        key = ("batch", window, groups)
        if key not in self._masks:
            start = torch.tensor(self.lengths, device=like.device)[:, None, None]
            query = start + torch.arange(self.count, device=like.device)[None, :, None]
            keys = torch.arange(max(self.lengths) + self.count, device=like.device)[None, None, :]
            self._masks[key] = _additive(query, keys, window, like).repeat(1, groups, 1)[:, None]
        mask = self._masks[key]
        assert mask is not None
        return mask

    def _build(self, length: int, window: int | None, groups: int, like: Tensor) -> Tensor | None:
        total = length + self.count
        if self.count == 1 and (window is None or total <= window):
            return None
        query = torch.arange(length, total, device=like.device)[:, None]
        key = torch.arange(total, device=like.device)[None, :]
        return _additive(query, key, window, like).repeat(groups, 1)


def _additive(query: Tensor, key: Tensor, window: int | None, like: Tensor) -> Tensor:
    """0 where the query position may see the key position, -inf elsewhere."""
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    hspec_rows: AttentionRows | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Grouped-query attention, one batch row at a time unless all are equally long.

    The query heads that share a KV head are folded into rows of one matrix, so K and V are read once and never repeated.
    Rows are handled one by one where lengths differ: a row's result then cannot depend on its neighbours.

    Args:
        query: ``[batch, heads, count, head_dim]``.
        key, value: ``[batch, kv_heads, longest, head_dim]``, views of the cache.
        sliding_window: of this layer; every family that has one passes it (not all keep it on the module).

    Returns:
        ``[batch, count, heads, head_dim]`` and no weights.
    """
    if hspec_rows is None:
        raise AssertionError("the hspec attention runs only under hspec.targets.Target")
    window = sliding_window
    batch, heads, count, dim = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * count, dim)

    def of(rows: slice, length: int) -> Tensor:
        if length == 0 and count > 1 and (window is None or count <= window):  # half the work: no mask, one triangle
            out = F.scaled_dot_product_attention(
                query[rows], key[rows, :, :count], value[rows, :, :count], is_causal=True, scale=scaling, enable_gqa=True
            )
            return out.reshape(out.shape[0], key.shape[1], groups * count, dim)
        mask = hspec_rows.mask(length, window, groups, query)
        end = length + count
        return F.scaled_dot_product_attention(
            folded[rows], key[rows, :, :end], value[rows, :, :end], attn_mask=mask, scale=scaling
        )

    lengths = hspec_rows.lengths
    if len(set(lengths)) == 1:
        out = of(slice(0, batch), lengths[0])
    elif not hspec_rows.exact:
        mask = hspec_rows.batch_mask(window, groups, query)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        out = torch.cat([of(slice(row, row + 1), length) for row, length in enumerate(lengths)])
    return out.view(batch, heads, count, dim).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
