"""What decoding keeps of a batch of sequences between steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hspec.targets.cache import CacheShape, KVCache, KVView
from hspec.targets.target import Target


@dataclass
class DecodingState:
    """The target's KV cache and, beside it, what the drafter keeps of the same tokens, if it keeps anything.

    Both have the same rows, the same capacity, and between steps the same lengths.
    """

    cache: KVCache
    memory: KVCache | None

    @staticmethod
    def new(target: Target, memory: CacheShape | None, batch: int, capacity: int) -> DecodingState:
        own = None if memory is None else KVCache(memory, batch, capacity, target.dtype, target.device)
        return DecodingState(target.new_cache(batch, capacity), own)

    def _both(self) -> tuple[KVCache, ...]:
        return (self.cache,) if self.memory is None else (self.cache, self.memory)

    @property
    def batch(self) -> int:
        return self.cache.batch

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    def rows(self, start: int, stop: int) -> DecodingState:
        """Rows ``start .. stop``, sharing storage (lengths are copied)."""
        return DecodingState(self.cache.rows(start, stop), None if self.memory is None else self.memory.rows(start, stop))

    def set_length(self, row: int, length: int) -> None:
        for cache in self._both():
            cache.lengths[row] = length

    def move_row(self, source: int, target: int) -> None:
        for cache in self._both():
            cache.move_row(source, target)

    def copy_from(self, other: DecodingState, count: int) -> None:
        """Take over the first ``count`` tokens of every row of a smaller state."""
        for old, new in zip(other._both(), self._both(), strict=True):
            for source, target in zip((*old.keys, *old.values), (*new.keys, *new.values), strict=True):
                target[:, :, :count] = source[:, :, :count]

    def memory_view(self) -> KVView | None:
        return None if self.memory is None else self.memory.view()

    def keep(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        """Write what the drafter keeps of the next tokens, ``[batch, kv_heads, S, head_dim]`` by layer, behind every row's
        length; the lengths stay as they are."""
        assert self.memory is not None
        self.memory.stage(kept[0][0].shape[2])
        for layer, (keys, values) in enumerate(kept):
            self.memory.update(keys, values, layer)
