"""What drafting costs in memory: nothing that grows with the context."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hspec.drafters import attention
from hspec.drafters.context import DraftContext
from hspec.drafters.parallel import ParallelDrafter
from hspec.targets.cache import KVCache
from hspec.targets.target import Target
from tests.tiny import tiny_drafter

WINDOW, K = 1024, 5
FLOAT = 4  # bytes


def allocations(work: Callable[[], object]) -> list[int]:
    """Bytes of every allocation and (negative) release during ``work``, in order, below the level of operators too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    found, stack = [], list(prof.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    assert found
    return [size for _, size in sorted(found, key=lambda pair: pair[0])]


def peak(sizes: list[int]) -> int:
    live = most = 0
    for size in sizes:
        live += size
        most = max(most, live)
    return most


@pytest.fixture
def windowed(target: Target) -> ParallelDrafter:
    return tiny_drafter(target, window=WINDOW, block_size=K + 1)


def make_context(target: Target, drafter: ParallelDrafter, length: int, batch: int = 1) -> tuple[DraftContext, KVCache]:
    cache = target.new_cache(batch, length + 8)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    cache.lengths = [length] * batch
    taps = torch.randn(batch, 1, len(drafter.taps), target.hidden_size)
    anchors, positions = torch.full((batch, 1), 7), torch.full((batch, 1), length)
    return DraftContext(anchors, positions, taps, cache.view()), cache


def measure(target: Target, drafter: ParallelDrafter, length: int) -> list[int]:
    context, _ = make_context(target, drafter, length)
    drafter.propose(context, K)  # caches of the libraries are filled by a first call
    return allocations(lambda: drafter.propose(context, K))


def test_peak_is_the_same_for_a_longer_context(target: Target, windowed: ParallelDrafter) -> None:
    short, long = measure(target, windowed, 2048), measure(target, windowed, 8000)
    assert peak(short) == peak(long)
    assert sorted(short) == sorted(long)  # not one allocation depends on the context's length


def test_nothing_is_larger_than_the_scores_of_the_window(target: Target, windowed: ParallelDrafter) -> None:
    """A copy of the window's keys would be: heads x slots < kv_heads x head_dim."""
    a = windowed.config.attention
    assert a is not None
    scores = a.heads * (K + 1) * (WINDOW + K + 1) * FLOAT
    copy = a.kv_heads * a.head_dim * WINDOW * FLOAT
    assert scores < copy
    assert max(measure(target, windowed, 8000)) <= scores


def test_a_copy_of_the_window_would_be_seen(target: Target, windowed: ParallelDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    a = windowed.config.attention
    assert a is not None
    honest, attend = measure(target, windowed, 2048), attention.attend

    def copying(q: Tensor, k: Tensor, v: Tensor, ck: Tensor, cv: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return attend(q, k, v, ck.clone(), cv, mask, causal)

    monkeypatch.setattr(attention, "attend", copying)
    dishonest = measure(target, windowed, 2048)
    assert max(dishonest) >= a.kv_heads * a.head_dim * WINDOW * FLOAT > max(honest)
    assert peak(dishonest) > peak(honest)


def test_a_drafter_without_window_is_not_flat(target: Target) -> None:
    """The measure would see a drafter whose work grows with the context."""
    drafter = tiny_drafter(target, window=None, block_size=K + 1)
    assert peak(measure(target, drafter, 8000)) > 2 * peak(measure(target, drafter, 2048))


@pytest.mark.parametrize("batch", [1, 3])
def test_keys_and_values_are_read_where_they_lie(
    target: Target, windowed: ParallelDrafter, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """What the attention is given are views into the cache's storage: exactly the window of each row."""
    context, cache = make_context(target, windowed, 2000, batch)
    seen: list[tuple[Tensor, Tensor]] = []
    attend = attention.attend

    def watching(q: Tensor, k: Tensor, v: Tensor, ck: Tensor, cv: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        seen.append((ck, cv))
        return attend(q, k, v, ck, cv, mask, causal)

    monkeypatch.setattr(attention, "attend", watching)
    windowed.propose(context, K)
    (layer,) = windowed.config.kv_layers
    assert len(seen) == batch
    for row, pair in enumerate(seen):
        for read, whole in zip(pair, (cache.keys[layer], cache.values[layer]), strict=True):
            assert read.shape == (1, 2, WINDOW, 16)
            assert read.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert read.data_ptr() == whole[row, 0, 2000 - WINDOW].data_ptr()
            assert read.stride() == whole.stride()


def test_drafter_keeps_nothing_between_calls(target: Target, windowed: ParallelDrafter) -> None:
    """No cache of its own: what a call allocated is gone, but for the drafts, when it returns."""
    context, _ = make_context(target, windowed, 2048)
    windowed.propose(context, K)
    kept = []
    sizes = allocations(lambda: kept.append(windowed.propose(context, K)))
    assert sum(sizes) <= K * 8 + 64  # the tokens, and the allocator's rounding
