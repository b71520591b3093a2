"""Attention over the cache against a written-out softmax, row by row and all rows in one masked call."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from hspec.targets.attention import AttentionRows, TreeRows, ancestors, attend

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


TREES = [[0, 1, 2, 3, 2, 1, 2], [0], [0, 1, 1, 1]]
HOW = {"row by row": (True, True), "a call each": (True, False), "one call": (False, True)}


def tree_written_out(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], trees: list[list[int]], window: int | None, scaling: float
) -> Tensor:
    """Every path by itself, as a chain, in double precision; padding stays 0."""
    out = torch.zeros(q.shape[0], q.shape[2], HEADS, DIM, dtype=torch.double)
    for b, depths in enumerate(trees):
        for i, depth in enumerate(depths):
            path = [max(j for j in range(i + 1) if depths[j] == d and min(depths[j : i + 1]) >= d) for d in range(depth + 1)]
            slots = [*range(lengths[b]), *(lengths[b] + j for j in path)]
            own = slice(b, b + 1)
            at = [lengths[b] + depth]
            out[own, i] = written_out(q[own, :, i : i + 1], k[own, :, slots], v[own, :, slots], at, window, scaling)[:, 0]
    return out


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [9, 9, 9], [0, 20, 7], [3, 3, 4]], ids=str)
def test_a_tree_against_its_paths(lengths: list[int], window: int | None, how: str) -> None:
    q = torch.randn(3, HEADS, 7, DIM)
    cache_k, cache_v = torch.randn(2, 3, KV_HEADS, CAPACITY, DIM)
    longest = max(lengths) + 7
    k, v = cache_k[:, :, :longest], cache_v[:, :, :longest]
    before = k.clone(), v.clone()
    rows = TreeRows(lengths, TREES, *HOW[how])
    wanted = tree_written_out(q, k, v, lengths, TREES, window, 0.3)
    for other in (3, window):  # the masks are kept for the forward; each kind of layer must get its own
        out, _ = attend(nn.Module(), q, k, v, None, scaling=0.3, sliding_window=other, hspec_rows=rows)
    assert out.shape == (3, 7, HEADS, DIM) and torch.isfinite(out).all()
    for b, depths in enumerate(TREES):
        torch.testing.assert_close(out[b, : len(depths)].double(), wanted[b, : len(depths)], atol=1e-5, rtol=1e-5)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1]), "what is staged lies where it lay"


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("how", HOW)
def test_a_tree_does_not_see_its_neighbours(how: str, window: int | None) -> None:
    """Nor other branches, nor what lies behind it: padding and rejected drafts."""
    lengths = [4, 12]
    q = torch.randn(2, HEADS, 5, DIM)
    k, v = torch.randn(2, 2, KV_HEADS, 17, DIM)

    def run(k: Tensor, v: Tensor) -> Tensor:
        rows = TreeRows(lengths, [[0, 1, 2, 1], [0, 1, 2, 3, 1]], *HOW[how])
        return attend(nn.Module(), q, k.clone(), v.clone(), None, 0.3, sliding_window=window, hspec_rows=rows)[0]

    first = run(k, v)
    for tensor in (k, v):
        tensor[0, :, 8:] = 1e4
        tensor[0, :, 4 + 2] = 1e4
        tensor[1] = 77.0
    second = run(k, v)
    for row, same in enumerate((True, True, False, True)):
        assert torch.equal(first[0, row], second[0, row]) == same


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("bitwise", [True, False])
def test_a_tree_is_the_same_in_a_larger_batch(bitwise: bool, window: int | None) -> None:
    lengths, q = [4, 12, 9], torch.randn(3, HEADS, 7, DIM)
    k, v = torch.randn(2, 3, KV_HEADS, 19, DIM)
    together, _ = attend(
        nn.Module(), q, k, v, None, 0.3, sliding_window=window, hspec_rows=TreeRows(lengths, TREES, True, bitwise)
    )
    for b, (length, own) in enumerate(zip(lengths, TREES, strict=True)):
        n, one = len(own), slice(b, b + 1)
        parts = q[one, :, :n], k[one, :, : length + n], v[one, :, : length + n]
        rows = TreeRows([length], [own], True, bitwise)
        alone, _ = attend(nn.Module(), *parts, None, 0.3, sliding_window=window, hspec_rows=rows)
        assert torch.equal(alone[0], together[b, :n])


@pytest.mark.parametrize("window", [None, 1])
def test_no_row_of_a_tree_mask_is_empty(window: int | None) -> None:
    """Not even of padding behind no prefix at all: some kernels give NaN there, which would reach the cache."""
    mask = TreeRows([0, 3, 0], TREES, exact=False)._mask(window, 2, torch.zeros(1))
    assert mask.shape == (3, 1, 14, 10) and (mask == 0).any(-1).all()


@pytest.mark.parametrize("depths", [[1], [0, 0], [0, 2], [0, 1, 3], [0, 1, 2, 0], [0, -1]], ids=str)
def test_depths_of_no_tree_are_refused(depths: list[int]) -> None:
    with pytest.raises(AssertionError, match="not the depths of a tree"):
        ancestors(depths)
    with pytest.raises(AssertionError, match="not the depths of a tree"):
        TreeRows([3], [depths])


def test_ancestors() -> None:
    assert ancestors([0, 1, 2, 1]).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]


def test_it_runs_under_a_target_only() -> None:
    x = torch.randn(1, 2, 1, 4)
    with pytest.raises(AssertionError, match="only under"):
        attend(nn.Module(), x, x, x, None)
