"""The preallocated KV cache: staging, rollback by length, rows, and views that share its storage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hspec.errors import UsageError
from hspec.targets.cache import CacheShape, KVCache

SHAPE = CacheShape(layers=2, kv_heads=3, head_dim=4)


def new(batch: int = 3, capacity: int = 10) -> KVCache:
    return KVCache(SHAPE, batch, capacity, torch.float32, "cpu")


def rows(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, count, 4, generator=torch.Generator().manual_seed(seed))


def write(cache: KVCache, count: int, seed: int = 0) -> Tensor:
    """Stage ``count`` rows; layer 1 gets twice layer 0's, and values are the keys' negatives."""
    keys = rows(cache.batch, count, seed)
    cache.stage(count)
    for layer in (0, 1):
        k, v = cache.update((layer + 1) * keys, -(layer + 1) * keys, layer)
        assert k.shape[2] == v.shape[2] == max(cache.lengths) + count
    return keys


def test_rows_of_equal_length() -> None:
    cache = new()
    first = write(cache, 4)
    cache.advance([4, 4, 4])
    second = write(cache, 2, seed=1)
    for layer in (0, 1):
        assert torch.equal(cache.keys[layer][:, :, :6], (layer + 1) * torch.cat((first, second), 2))
        assert torch.equal(cache.values[layer], -cache.keys[layer])
        assert not cache.keys[layer][:, :, 6:].any()


def test_rows_of_different_length() -> None:
    cache = new()
    first = write(cache, 4)
    cache.advance([1, 4, 2])
    assert cache.lengths == [1, 4, 2]
    second = write(cache, 3, seed=1)
    for row, length in enumerate((1, 4, 2)):
        for layer in (0, 1):
            kept = cache.keys[layer][row]
            assert torch.equal(kept[:, :length], (layer + 1) * first[row, :, :length])
            assert torch.equal(kept[:, length : length + 3], (layer + 1) * second[row])
            assert torch.equal(cache.values[layer][row], -kept)


def test_what_is_not_accepted_is_overwritten() -> None:
    cache = new(batch=1)
    write(cache, 5)
    cache.advance([2])
    second = write(cache, 3, seed=1)
    cache.advance([3])
    assert cache.lengths == [5] and torch.equal(cache.keys[0][:, :, 2:5], second)


def test_only_what_is_staged_can_be_accepted() -> None:
    cache = new(batch=2)
    write(cache, 3)
    for counts in ([4, 0], [-1, 0]):
        with pytest.raises(AssertionError, match="cannot accept"):
            cache.advance(counts)
    cache.advance([3, 0])
    with pytest.raises(AssertionError, match="cannot accept"):
        cache.advance([1, 0])
    assert cache.lengths == [3, 0]


def test_a_full_cache() -> None:
    cache = new(batch=2, capacity=6)
    write(cache, 4)
    cache.advance([4, 1])
    cache.stage(2)
    with pytest.raises(UsageError, match="7 tokens do not fit into a KV cache of 6: shorten"):
        cache.stage(3)


@pytest.mark.parametrize("together", [True, False])
def test_keep_paths(together: bool) -> None:
    """As if only the rows of the paths had been staged, in their order; what is behind them may be anything."""
    paths = [[0, 2, 5], [0], [0, 1, 2, 4]] if together else [[0, 1], [0, 1, 2], []]
    cache = new()
    first = write(cache, 4)
    cache.advance([4, 1, 2])
    second = write(cache, 6, seed=1)
    cache.keep_paths(paths)
    assert cache.lengths == [start + len(path) for start, path in zip((4, 1, 2), paths, strict=True)]
    for row, (start, path) in enumerate(zip((4, 1, 2), paths, strict=True)):
        wanted = torch.cat((first[row, :, :start], second[row][:, path]), 1)
        for layer in (0, 1):
            assert torch.equal(cache.keys[layer][row, :, : start + len(path)], (layer + 1) * wanted)
            assert torch.equal(cache.values[layer][row, :, : start + len(path)], -(layer + 1) * wanted)


def test_keep_paths_of_rows_that_share_storage() -> None:
    cache = new(batch=2)
    write(cache, 4)
    cache.advance([3, 4])
    part = cache.rows(0, 1)
    written = write(part, 5, seed=1)
    part.keep_paths([[0, 3]])
    assert part.lengths == [5] and torch.equal(cache.keys[0][0, :, 3:5], written[0][:, [0, 3]])


@pytest.mark.parametrize("path", [[3], [-1], [0, 0], [1, 0]], ids=str)
def test_what_is_no_path_is_not_kept(path: list[int]) -> None:
    cache = new(batch=2)
    write(cache, 3)
    with pytest.raises(AssertionError, match="cannot keep"):
        cache.keep_paths([[0], path])


def test_truncate() -> None:
    cache = new()
    write(cache, 5)
    cache.advance([5, 3, 5])
    cache.truncate(1, 0)
    cache.truncate(2, 5)
    assert cache.lengths == [5, 0, 5]
    with pytest.raises(AssertionError, match="has 0 tokens, not 1"):
        cache.truncate(1, 1)


def test_rows_share_storage_and_keep_their_own_lengths() -> None:
    cache = new()
    write(cache, 4)
    cache.advance([4, 2, 1])
    part = cache.rows(1, 3)
    assert part.batch == 2 and part.lengths == [2, 1]
    written = write(part, 2, seed=1)
    part.advance([2, 2])
    assert cache.lengths == [4, 2, 1]
    assert torch.equal(cache.keys[0][1, :, 2:4], written[0]) and torch.equal(cache.keys[0][2, :, 1:3], written[1])
    for whole, own in zip([*cache.keys, *cache.values], [*part.keys, *part.values], strict=True):
        assert own.data_ptr() == whole[1].data_ptr()


def test_a_view_shares_storage() -> None:
    cache = new()
    write(cache, 4)
    cache.advance([4, 2, 1])
    view = cache.view()
    assert view.lengths == (4, 2, 1)
    for layer in (0, 1):
        k, v = view.layer(layer)
        assert k.data_ptr() == cache.keys[layer].data_ptr() and v.data_ptr() == cache.values[layer].data_ptr()
        assert k.shape == (3, 3, 10, 4)
    cache.advance([0, 0, 0])
    written = write(cache, 1, seed=2)
    assert torch.equal(view.keys[0][0, :, 4], written[0, :, 0]), "what is written later is seen without a copy"
    assert view.lengths == (4, 2, 1)


def test_move_row() -> None:
    cache = new()
    written = write(cache, 4)
    cache.advance([4, 2, 3])
    cache.move_row(2, 0)
    assert cache.lengths == [3, 2, 3]
    assert torch.equal(cache.keys[1][0, :, :3], 2 * written[2, :, :3])
    assert torch.equal(cache.values[0][0, :, :3], -written[2, :, :3])
    assert torch.equal(cache.keys[0][1, :, :4], written[1])


def test_what_it_costs() -> None:
    assert new().nbytes == 2 * 2 * 3 * 3 * 10 * 4 * 4
    assert SHAPE.bytes_per_token(torch.float32) * 3 * 10 == new().nbytes
    assert SHAPE.bytes_per_token(torch.bfloat16) == 2 * 3 * 4 * 2 * 2
