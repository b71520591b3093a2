"""Page layouts against tensors by position, and attention over pages against attention over a cache."""

from __future__ import annotations

import pytest
import torch

from hspec.drafters.attention import attend
from hspec.drafters.context import PagedKV, Prefix
from hspec.errors import HSpecError
from hspec.serving.flash import FlashLayer, attend_block, flash_view, merge
from hspec.serving.pages import LAYOUTS, GatheredLayer, cpu_vec, flash, gather, gathered_view
from hspec.serving.self_test import check_pages
from tests.serving.paged import cpu_vec_pages, flash_pages, shuffled_tables

B, KV, HEADS, D, S, BLOCK, BLOCKS, T = 3, 2, 6, 8, 4, 8, 16, 37
WRITERS = {"cpu": (cpu_vec_pages, cpu_vec), "flash": (flash_pages, flash)}


@pytest.fixture(params=WRITERS)
def cache(request):
    """K, V by position; the pages that hold them; their layout; the tables."""
    write, layout = WRITERS[request.param]
    keys, values = torch.randn(2, B, KV, T, D)
    tables = shuffled_tables(B, T, BLOCK, BLOCKS)
    return keys, values, write(keys, values, tables, BLOCK, BLOCKS), layout, tables


@pytest.mark.parametrize("start, stop", [(0, 1), (0, 8), (3, 5), (7, 9), (5, 37), (8, 16), (36, 37), (4, 4)])
def test_gather_gives_what_lies_at_these_positions(cache, start, stop):
    keys, values, pages, layout, tables = cache
    for side, dense in zip(layout(pages), (keys, values), strict=True):
        for b in range(B):
            assert torch.equal(gather(side, tables[b], start, stop), dense[b, :, start:stop])


def test_layouts_are_views(cache):
    _, _, pages, layout, _ = cache
    for side in layout(pages):
        assert side.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()
        assert side.shape == (BLOCKS, KV, BLOCK, D)


def block_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(B, 1, HEADS, S, D), torch.randn(B, 1, KV, S, D), torch.randn(B, 1, KV, S, D)


def expected(q, k, v, keys, values, prefix, causal):
    rows = []
    for b in range(B):
        one, window = slice(b, b + 1), slice(int(prefix.start[b, 0]), int(prefix.stop[b, 0]))
        rows.append(attend(q[one], k[one], v[one], keys[one, :, window], values[one, :, window], None, causal))
    return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 1, 5, 12, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_gathered_attention_is_that_over_a_cache(cache, window, causal):
    keys, values, pages, layout, tables = cache
    prefix = Prefix.before(torch.tensor([[37], [1], [20]]), window)
    q, k, v = block_inputs()
    before = pages.clone()
    view = gathered_view({3: pages}, layout, tables, [37, 1, 20])
    layer = view.layer(3)
    assert isinstance(layer, GatheredLayer) and isinstance(layer, PagedKV)
    mine = layer.attend(q, k, v, prefix, causal)
    assert torch.allclose(mine, expected(q, k, v, keys, values, prefix, causal), atol=1e-6)
    assert torch.equal(pages.nan_to_num(), before.nan_to_num())  # nothing is written


def paged_reference(q, keys, values, tables, lengths, window):
    """What vLLM's kernel computes, a row and a head at a time (:class:`hspec.serving.flash.PagedKernel`)."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    group = q.shape[1] // keys.shape[2]
    for b in range(q.shape[0]):
        stop = int(lengths[b])
        start = 0 if window is None else max(0, stop - window)
        places = [(int(tables[b, t // BLOCK]), t % BLOCK) for t in range(start, stop)]
        for h in range(q.shape[1]):
            k = torch.stack([keys[block, place, h // group] for block, place in places])
            v = torch.stack([values[block, place, h // group] for block, place in places])
            scores = k @ q[b, h] * q.shape[2] ** -0.5
            lse[h, b] = scores.logsumexp(0)
            out[b, h] = scores.softmax(0) @ v
    return out, lse


@pytest.mark.parametrize("window", [None, 1, 5, 12, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_over_pages_merged_with_the_block(window, causal):
    keys, values = torch.randn(2, B, KV, T, D)
    tables = shuffled_tables(B, T, BLOCK, BLOCKS)
    pages = flash_pages(keys, values, tables, BLOCK, BLOCKS)
    prefix = Prefix.before(torch.tensor([[37], [1], [20]]), window)
    q, k, v = block_inputs()
    layer = flash_view({0: pages}, tables, [37, 1, 20], paged_reference).layer(0)
    assert isinstance(layer, FlashLayer)
    mine = layer.attend(q, k, v, prefix, causal)
    assert torch.allclose(mine, expected(q, k, v, keys, values, prefix, causal), atol=1e-5)


def test_merge_is_one_softmax():
    scores, values = torch.randn(5, 11), torch.randn(11, D)
    parts = [(s.softmax(-1) @ v, s.logsumexp(-1)) for s, v in ((scores[:, :4], values[:4]), (scores[:, 4:], values[4:]))]
    assert torch.allclose(merge(*parts[0], *parts[1]), scores.softmax(-1) @ values, atol=1e-6)


def test_attention_within_the_block_is_causal_if_asked():
    q, k, v = torch.randn(1, KV, 3, S, D), torch.randn(1, KV, S, D), torch.randn(1, KV, S, D)
    out, _ = attend_block(q, k, v, causal=True)
    assert torch.allclose(out[:, :, :, 0], v[:, :, None, 0].expand(1, KV, 3, D), atol=1e-6)  # slot 0 sees itself only


def writer(pages: torch.Tensor, layout):
    sides = layout(pages)

    def write(keys, values, slots):
        for t, slot in enumerate(slots.tolist()):
            for side, own in zip(sides, (keys, values), strict=True):
                side[slot // BLOCK, :, slot % BLOCK] = own[t]

    return write


@pytest.mark.parametrize("layout", [cpu_vec, flash])
def test_self_test_restores_the_pages(layout):
    pages = torch.randn(BLOCKS, KV, BLOCK, 2 * D)
    before = pages.clone()
    check_pages(pages, layout, writer(pages, layout), KV, "layer 0")
    assert torch.equal(pages, before)


@pytest.mark.parametrize("written, read", [(cpu_vec, flash), (flash, cpu_vec)])
def test_self_test_refuses_another_layout(written, read):
    pages = torch.randn(BLOCKS, KV, BLOCK, 2 * D)
    before = pages.clone()
    with pytest.raises(HSpecError, match="layer 7 are not those that vLLM writes"):
        check_pages(pages, read, writer(pages, written), KV, "layer 7")
    assert torch.equal(pages, before)


def test_self_test_refuses_heads_of_others():
    pages = torch.randn(BLOCKS, KV, BLOCK, 2 * D)
    with pytest.raises(HSpecError, match=f"layer 7 hold {KV} KV heads, and the drafter attends to 1: vLLM spreads heads"):
        check_pages(pages, flash, writer(pages, flash), 1, "layer 7")


def test_every_known_layout_is_one_of_these():
    assert set(LAYOUTS.values()) == {cpu_vec, flash}
