"""The target's attention over the preallocated cache, registered with transformers under the name ``hspec``.

transformers hands every decoder layer's rotated q, k, v to the registered function; this one knows that slot p of the
cache is position p, that rows of a batch have their own lengths, and that some layers see a window only. Of a draft tree
it also knows which of the staged slots lie on a query's own path, and at what positions.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def ancestors(depths: Sequence[int]) -> Tensor:
    """Which rows lie on each row's path from the root, itself included.

    Args:
        depths: of the rows of one tree in preorder, the root (the anchor, depth 0) first. In preorder the depths alone say
            who the parent is: the last row before that is one less deep.

    Returns:
        ``[n, n]`` bool: ``[i, j]`` where row j is an ancestor of row i, or i.

    Raises:
        AssertionError: no tree has these depths.
    """
    visible, path = [], list[int]()
    for row, depth in enumerate(depths):
        if not min(row, 1) <= depth <= len(path):
            raise AssertionError(f"not the depths of a tree in preorder: {list(depths)}")
        path[depth:] = [row]
        visible.append([other in path for other in range(len(depths))])
    return torch.tensor(visible, dtype=torch.bool)


@dataclass
class TreeRows:
    """As :class:`AttentionRows`, for queries that are one draft tree a sequence; made once a forward.

    Row i of sequence b is staged in slot ``lengths[b] + i``, stands at position ``lengths[b] + depths[b][i]``, and sees the
    accepted prefix and its own path. Sequences with fewer rows than :attr:`count` are padded behind: what comes out there
    means nothing, and no row sees it.

    Raises:
        AssertionError: no tree has these depths.
    """

    lengths: list[int]
    depths: Sequence[Sequence[int]]
    """Of each sequence's rows (see :func:`ancestors`)."""
    exact: bool = True
    """Whether sequences are handled one by one, so that none depends on its neighbours in any bit."""
    bitwise: bool = True
    """Whether, when exact, every row is computed by the call that plain decoding would make for it, over the same slots, so
    that it equals plain decoding in every bit. Otherwise one masked call runs its sums over invisible slots too, and rounds
    differently."""
    _masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count = max(map(len, self.depths))
        self._ancestors = [ancestors(own) for own in self.depths]
        self._depths = torch.tensor([[*own, *[0] * (self.count - len(own))] for own in self.depths])
        self._plain = AttentionRows(self.lengths, 1)
        if self.exact and not self.bitwise:
            self._alone = [TreeRows([n], [own], exact=False) for n, own in zip(self.lengths, self.depths, strict=True)]

    def positions(self, device: torch.device) -> Tensor:
        """For RoPE, ``[batch, count]`` int64."""
        return (torch.tensor(self.lengths)[:, None] + self._depths).to(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None) -> Tensor:
        """``[batch, heads, count, head_dim]``; K, V ``[batch, kv_heads, longest + count, head_dim]`` -> as the query."""
        if not self.exact:
            return _folded(query, key, value, self._mask(window, query.shape[1] // key.shape[1], query), scaling)
        out = torch.zeros_like(query)
        for b, (length, own) in enumerate(zip(self.lengths, self.depths, strict=True)):
            row, n = slice(b, b + 1), len(own)
            parts = query[row, :, :n], key[row, :, : length + n], value[row, :, : length + n]
            if self.bitwise:
                out[row, :, :n] = self._row_by_row(length, own, *parts, window, scaling)
            else:
                out[row, :, :n] = self._alone[b].attend(*parts, window, scaling)
        return out

    def _row_by_row(
        self,
        length: int,
        depths: Sequence[int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        scaling: float | None,
    ) -> Tensor:
        """One sequence as plain decoding would run it: a call for each row, with its path right behind the prefix.

        In preorder, when a row is due, its ancestors lie at slots ``length ..`` already: only its own K and V have to be put
        in place, and nothing of the prefix is copied. The staged rows are put back at the end.
        """
        groups, out = query.shape[1] // key.shape[1], []
        keys, values = key[:, :, length:].clone(), value[:, :, length:].clone()
        for i, slot in enumerate(length + depth for depth in depths):
            key[:, :, slot], value[:, :, slot] = keys[:, :, i], values[:, :, i]
            seen = slice(0, slot + 1)
            mask = self._plain.mask(slot, window, groups, query)
            out.append(_folded(query[:, :, i : i + 1], key[:, :, seen], value[:, :, seen], mask, scaling))
        key[:, :, length:], value[:, :, length:] = keys, values
        return torch.cat(out, 2)

    def _mask(self, window: int | None, groups: int, like: Tensor) -> Tensor:
        """Additive mask ``[batch, 1, groups * count, longest + count]`` of all sequences; padding sees prefix and itself."""
        key = (window, groups)
        if key not in self._masks:
            device, n = like.device, self.count
            on_path = torch.eye(n, dtype=torch.bool).repeat(len(self.depths), 1, 1)
            for b, own in enumerate(self._ancestors):
                on_path[b, : len(own), : len(own)] = own
            start, depths = torch.tensor(self.lengths, device=device)[:, None, None], self._depths.to(device)
            slot = torch.arange(max(self.lengths) + n, device=device)
            row = (slot - start).clamp(0, n - 1)  # [batch, 1, slots]: the staged row that lies in a slot, if one does
            staged = (slot >= start) & (slot < start + n)
            visible = (slot < start) | (staged & on_path.to(device).gather(2, row.expand(-1, n, -1)))
            if window is not None:
                position = torch.where(staged, start + depths[:, None].gather(2, row), slot)
                visible &= position > start + depths[:, :, None] - window
            additive = torch.zeros(visible.shape, dtype=like.dtype, device=device).masked_fill_(~visible, float("-inf"))
            self._masks[key] = additive.repeat(1, groups, 1)[:, None]
        return self._masks[key]


def _folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """The query heads that share a KV head as rows of one matrix; result as the query ``[batch, heads, count, head_dim]``."""
    batch, heads, count, dim = query.shape
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1] * count, dim)
    return F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling).reshape(query.shape)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    hspec_rows: AttentionRows | TreeRows | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Grouped-query attention, one batch row at a time unless all are equally long.

    The query heads that share a KV head are folded into rows of one matrix, so K and V are read once and never repeated.
    Rows are handled one by one where lengths differ: a row's result then cannot depend on its neighbours.

    Args:
        query: ``[batch, heads, count, head_dim]``.
        key, value: ``[batch, kv_heads, longest, head_dim]``, views of the cache. Of a tree the staged slots are moved about
            and put back.
        sliding_window: of this layer; every family that has one passes it (not all keep it on the module).

    Returns:
        ``[batch, count, heads, head_dim]`` and no weights.
    """
    if hspec_rows is None:
        raise AssertionError("the hspec attention runs only under hspec.targets.Target")
    window = sliding_window
    if isinstance(hspec_rows, TreeRows):
        return hspec_rows.attend(query, key, value, window, scaling).transpose(1, 2), None
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
