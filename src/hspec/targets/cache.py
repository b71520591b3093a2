"""The target's KV cache: preallocated, rolled back by length, readable by drafters in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hspec.errors import UsageError


@dataclass(frozen=True)
class CacheShape:
    """What one token costs: ``layers`` decoder layers, each with ``kv_heads`` K and V vectors of ``head_dim``."""

    layers: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(config: Any) -> CacheShape:
        """Of a target, from its transformers configuration."""
        return CacheShape(config.num_hidden_layers, config.num_key_value_heads, head_dim_of(config))

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.layers * self.kv_heads * self.head_dim * 2 * dtype.itemsize


def head_dim_of(config: Any) -> int:
    """Width of an attention head; a transformers configuration may leave it to be worked out."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class KVCache:
    """Post-RoPE keys and values of every layer, ``[batch, kv_heads, capacity, head_dim]`` each.

    Slot ``p`` of row ``b`` holds the token at position ``p``; rows have their own lengths. A forward *stages* rows
    behind each row's length; they count only once :meth:`advance` says so. Rolling back is therefore not advancing.

    Args:
        layers: which have room; None for all. Of the others there is nothing, ``[batch, kv_heads, 0, head_dim]``.
    """

    def __init__(
        self,
        shape: CacheShape,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layers: Collection[int] | None = None,
    ):
        self.shape = shape
        self.capacity = capacity
        rooms = [capacity if layers is None or layer in layers else 0 for layer in range(shape.layers)]
        sizes = [(batch, shape.kv_heads, room, shape.head_dim) for room in rooms]
        self.keys = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
        self.values = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
        self.lengths = [0] * batch
        self._staged = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def rows(self, start: int, stop: int) -> KVCache:
        """Rows ``start .. stop`` as a cache of their own that shares this one's storage (lengths are copied)."""
        view = object.__new__(KVCache)
        view.shape, view.capacity = self.shape, self.capacity
        view.keys = [t[start:stop] for t in self.keys]
        view.values = [t[start:stop] for t in self.values]
        view.lengths = self.lengths[start:stop]
        view._staged = 0
        return view

    def stage(self, count: int) -> None:
        """Make room for ``count`` new rows behind every row's length; the next :meth:`update` calls fill them.

        Raises:
            UsageError: the cache is too short for them.
        """
        longest = max(self.lengths, default=0) + count
        if longest > self.capacity:
            raise UsageError(
                f"{longest} tokens do not fit into a KV cache of {self.capacity}: shorten the prompt or the answer"
            )
        self._staged = count
        device = self.keys[0].device
        self._slots = (
            torch.arange(self.batch, device=device)[:, None],
            torch.tensor(self.lengths, device=device)[:, None] + torch.arange(count, device=device),
        )

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the staged rows of one layer (the method that transformers' attention calls).

        Args:
            keys, values: ``[batch, kv_heads, staged, head_dim]``, keys after RoPE.

        Returns:
            Views of the layer's K and V up to the longest row, ``[batch, kv_heads, longest, head_dim]``.
        """
        k, v, n = self.keys[layer], self.values[layer], self._staged
        if len(set(self.lengths)) == 1:
            start = self.lengths[0]
            k[:, :, start : start + n] = keys
            v[:, :, start : start + n] = values
        else:
            rows, slots = self._slots
            k[rows, :, slots] = keys.transpose(1, 2)
            v[rows, :, slots] = values.transpose(1, 2)
        longest = max(self.lengths) + n
        return k[:, :, :longest], v[:, :, :longest]

    def advance(self, counts: list[int]) -> None:
        """Accept the first ``counts[b]`` staged rows of every row; the rest is as if it had never been."""
        if any(not 0 <= count <= self._staged for count in counts):
            raise AssertionError(f"cannot accept {counts} of {self._staged} staged rows")
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._staged = 0

    def keep_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """Accept of every row the staged rows ``paths[b]`` only, moved up to lie right behind what is accepted.

        Afterwards the cache is what it would be, had these rows been staged alone and in this order; a rollback by length
        would leave a tree's rejected nodes between them.

        Args:
            paths: of each row, indices of staged rows, ascending (of a tree: the anchor's 0, then the accepted path's).
        """
        for path in paths:
            if list(path) != sorted({*path} & {*range(self._staged)}):
                raise AssertionError(f"cannot keep {list(path)} of {self._staged} staged rows")
        longest = max(map(len, paths), default=0)
        # Behind a shorter path each row is copied onto itself.
        source = [[*path, *range(len(path), longest)] for path in paths]
        if any(own != list(range(longest)) for own in source):
            device = self.keys[0].device
            rows = torch.arange(self.batch, device=device)[:, None]
            start = torch.tensor(self.lengths, device=device)[:, None]
            old, new = start + torch.tensor(source, device=device), start + torch.arange(longest, device=device)
            for tensor in (*self.keys, *self.values):
                tensor[rows, :, new] = tensor[rows, :, old]
        self.advance([len(path) for path in paths])

    def truncate(self, row: int, length: int) -> None:
        """Roll row ``row`` back to its first ``length`` tokens."""
        if not 0 <= length <= self.lengths[row]:
            raise AssertionError(f"row {row} has {self.lengths[row]} tokens, not {length}")
        self.lengths[row] = length

    def move_row(self, source: int, target: int) -> None:
        """Copy row ``source`` over row ``target``, so that the rows in use stay a prefix of the batch."""
        length = self.lengths[source]
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]
        self.lengths[target] = length

    def view(self) -> KVView:
        """A view of what is accepted so far, for a drafter to read in place."""
        return KVView(self.keys, self.values, tuple(self.lengths))

    # transformers asks a cache for these two before it builds masks; ours are built by the attention itself.
    def get_seq_length(self, layer: int = 0) -> int:
        return max(self.lengths, default=0)

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        return max(self.lengths, default=0) + query_length, 0


@dataclass(frozen=True)
class KVView:
    """Post-RoPE K and V by layer, sharing the cache's storage; drafters read it and never write.

    ``keys[layer]`` is ``[batch, kv_heads, capacity, head_dim]``; row ``b`` is valid up to ``lengths[b]``.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: tuple[int, ...]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys[index], self.values[index]
