"""Attention over the cache against a written-out softmax, row by row and all rows in one masked call."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from hspec.targets.attention import AttentionRows, attend

HEADS, KV_HEADS, DIM, CAPACITY = 6, 2, 8, 30


def written_out(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None, scaling: float) -> Tensor:
    """Every query by itself, in double precision."""
    out = torch.zeros(q.shape[0], q.shape[2], HEADS, DIM, dtype=torch.double)
    for b, h, c in itertools.product(range(q.shape[0]), range(HEADS), range(q.shape[2])):
        position = lengths[b] + c
        first = 0 if window is None else max(0, position - window + 1)
        keys = k[b, h // (HEADS // KV_HEADS), first : position + 1].double()
        values = v[b, h // (HEADS // KV_HEADS), first : position + 1].double()
        out[b, c, h] = (keys @ q[b, h, c].double() * scaling).softmax(0) @ values
    return out


@pytest.mark.parametrize("exact", [True, False], ids=["row by row", "one call"])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [9, 9, 9], [0, 20, 7], [3, 3, 4]], ids=str)
def test_against_a_softmax(lengths: list[int], count: int, window: int | None, exact: bool) -> None:
    q = torch.randn(3, HEADS, count, DIM)
    cache_k, cache_v = torch.randn(2, 3, KV_HEADS, CAPACITY, DIM)
    longest = max(lengths) + count
    k, v = cache_k[:, :, :longest], cache_v[:, :, :longest]  # views, as the cache gives them
    rows = AttentionRows(lengths, count, exact)
    out, weights = attend(nn.Module(), q, k, v, None, scaling=0.3, sliding_window=window, hspec_rows=rows)
    assert weights is None and out.shape == (3, count, HEADS, DIM)
    torch.testing.assert_close(out.double(), written_out(q, k, v, lengths, window, 0.3), atol=1e-5, rtol=1e-5)


def test_layers_with_and_without_a_window_share_one_forward() -> None:
    """The masks are kept for the forward; each kind of layer must get its own."""
    q = torch.randn(2, HEADS, 3, DIM)
    k, v = torch.randn(2, 2, KV_HEADS, 13, DIM)
    for exact in (True, False):
        rows = AttentionRows([10, 6], 3, exact)
        for window in (4, None, 4, 2, None):
            out, _ = attend(nn.Module(), q, k, v, None, scaling=0.3, sliding_window=window, hspec_rows=rows)
            torch.testing.assert_close(out.double(), written_out(q, k, v, [10, 6], window, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_a_row_does_not_see_its_neighbours(window: int | None) -> None:
    """Nor what a shorter row has behind its end: rejected drafts lie there."""
    lengths, count = [4, 12], 3
    q = torch.randn(2, HEADS, count, DIM)
    k, v = torch.randn(2, 2, KV_HEADS, 15, DIM)
    for exact in (True, False):
        first, _ = attend(
            nn.Module(), q, k, v, None, 0.3, sliding_window=window, hspec_rows=AttentionRows(lengths, count, exact)
        )
        changed_k, changed_v = k.clone(), v.clone()
        for changed in (changed_k, changed_v):
            changed[0, :, lengths[0] + count :] = 1e4
            changed[1] = 77.0
        second, _ = attend(
            nn.Module(),
            q,
            changed_k,
            changed_v,
            None,
            0.3,
            sliding_window=window,
            hspec_rows=AttentionRows(lengths, count, exact),
        )
        assert torch.equal(first[0], second[0])


def test_it_runs_under_a_target_only() -> None:
    x = torch.randn(1, 2, 1, 4)
    with pytest.raises(AssertionError, match="only under"):
        attend(nn.Module(), x, x, x, None)
