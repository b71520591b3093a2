"""The drafter's attention: which keys each slot sees, and that it only reads the target's cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hspec.drafters.attention import PrefixAttention, attend
from hspec.drafters.config import AttentionConfig
from hspec.drafters.context import DraftContext
from hspec.targets.cache import CacheShape, KVCache
from hspec.targets.target import Target
from tests.tiny import randomise, tiny_drafter

HEADS, KV_HEADS, DIM, HIDDEN = 6, 2, 4, 12
CAPACITY = 40
ROPE = {"rope_type": "default", "rope_theta": 100.0}


def make_layer(window: int | None = 5, causal: bool = True) -> PrefixAttention:
    config = AttentionConfig(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, window=window, causal_block=causal, rope=[ROPE])
    layer = PrefixAttention(HIDDEN, config, 0, eps=1e-6)
    randomise(layer, 3)
    return layer.requires_grad_(False)


def flat_rope(B: int, N: int, S: int) -> tuple[Tensor, Tensor]:
    """No rotation at all, so that values are easy to follow."""
    return torch.ones(B, N, S, DIM), torch.zeros(B, N, S, DIM)


def run(layer: PrefixAttention, x: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    B, N, S, _ = x.shape
    return layer(x, flat_rope(B, N, S), (keys, values), positions)


def naive(q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: Tensor, causal: bool) -> Tensor:
    """One query at a time over the list of the keys that it sees."""
    out = torch.zeros_like(q)
    B, N, H, S, d = q.shape
    for b in range(B):
        for n in range(N):
            for h in range(H):
                kv = h // (H // k.shape[2])
                for s in range(S):
                    last = s + 1 if causal else S
                    keys = torch.cat((context_k[b, kv][mask[b, n]], k[b, n, kv, :last]))
                    values = torch.cat((context_v[b, kv][mask[b, n]], v[b, n, kv, :last]))
                    weights = torch.softmax(keys @ q[b, n, h, s] / d**0.5, dim=0)
                    out[b, n, h, s] = weights @ values
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("B", "N", "T"), [(1, 1, 9), (2, 3, 9), (3, 1, 1), (1, 4, 20)])
def test_attend_is_softmax_over_context_and_block(B: int, N: int, T: int, causal: bool) -> None:
    S = 4
    q = torch.randn(B, N, HEADS, S, DIM)
    k, v = torch.randn(2, B, N, KV_HEADS, S, DIM)
    context_k, context_v = torch.randn(2, B, KV_HEADS, T, DIM)
    mask = torch.rand(B, N, T) < 0.6
    expected = naive(q, k, v, context_k, context_v, mask, causal)
    assert torch.allclose(attend(q, k, v, context_k, context_v, mask, causal), expected, atol=1e-5)
    everything = torch.ones(B, N, T, dtype=torch.bool)
    expected = naive(q, k, v, context_k, context_v, everything, causal)
    assert torch.allclose(attend(q, k, v, context_k, context_v, None, causal), expected, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_attend_without_context(causal: bool) -> None:
    q, (k, v) = torch.randn(2, 3, HEADS, 4, DIM), torch.randn(2, 2, 3, KV_HEADS, 4, DIM)
    empty = torch.zeros(2, KV_HEADS, 0, DIM)
    expected = naive(q, k, v, empty, empty, torch.zeros(2, 3, 0, dtype=torch.bool), causal)
    assert torch.allclose(attend(q, k, v, None, None, None, causal), expected, atol=1e-5)
    assert torch.allclose(attend(q, k, v, empty, empty, None, causal), expected, atol=1e-5)


def positions_read(layer: PrefixAttention, positions: Tensor, slot: int) -> list[list[int]]:
    """For each block of row 0, the cache positions whose values change the output of ``slot``."""
    x = torch.randn(positions.shape[0], positions.shape[1], 4, HIDDEN)
    keys = torch.randn(positions.shape[0], KV_HEADS, CAPACITY, DIM)
    found = []
    for n in range(positions.shape[1]):
        values = torch.randn(keys.shape, requires_grad=True)
        run(layer, x, keys, values, positions)[0, n, slot].sum().backward()
        assert values.grad is not None
        found.append(values.grad[0].abs().sum(dim=(0, 2)).nonzero().flatten().tolist())
    return found


@pytest.mark.parametrize("window", [5, None])
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_window_is_counted_from_the_anchor(window: int | None, slot: int) -> None:
    """The same for every slot; the anchor's own position is not among them. One block and many blocks alike."""
    anchors = [2, 7, 30]
    layer = make_layer(window)
    expected = [list(range(0 if window is None else max(0, a - window), a)) for a in anchors]
    assert positions_read(layer, torch.tensor([anchors]), slot) == expected
    for anchor, seen in zip(anchors, expected, strict=True):
        assert positions_read(layer, torch.tensor([[anchor]]), slot) == [seen]


def test_nothing_at_or_behind_the_anchor_is_read() -> None:
    layer, x = make_layer(), torch.randn(1, 1, 4, HIDDEN)
    keys, values = torch.randn(2, 1, KV_HEADS, CAPACITY, DIM)
    clean = run(layer, x, keys, values, torch.tensor([[11]]))
    for tensor in (keys, values):
        tensor[:, :, 11:] = float("nan")
        tensor[:, :, : 11 - 5] = float("nan")  # nor before the window
    assert torch.equal(run(layer, x, keys, values, torch.tensor([[11]])), clean)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("slot", range(4))
def test_which_slots_see_a_slot(causal: bool, slot: int) -> None:
    layer, x = make_layer(causal=causal), torch.randn(2, 3, 4, HIDDEN)
    keys, values = torch.randn(2, 2, KV_HEADS, CAPACITY, DIM)
    positions = torch.tensor([[3, 9, 20], [5, 6, 7]])
    changed = x.clone()
    changed[:, 1, slot] += 1.0
    before, after = (run(layer, inputs, keys, values, positions) for inputs in (x, changed))
    moved = (before - after).abs().amax(dim=(0, 3)) > 1e-5  # [N, S]
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[1, slot if causal else 0 :] = True  # no other block sees it
    assert torch.equal(moved, expected)


def test_one_block_path_equals_many_blocks_path() -> None:
    layer, x = make_layer(), torch.randn(2, 3, 4, HIDDEN)
    keys, values = torch.randn(2, 2, KV_HEADS, CAPACITY, DIM)
    positions = torch.tensor([[1, 9, 20], [5, 6, 33]])
    many = run(layer, x, keys, values, positions)
    for n in range(3):
        one = run(layer, x[:, n : n + 1], keys, values, positions[:, n : n + 1])
        assert torch.allclose(one, many[:, n : n + 1], atol=1e-5)


def test_first_token_has_no_context() -> None:
    layer, x = make_layer(), torch.randn(1, 1, 4, HIDDEN)
    nan = torch.full((1, KV_HEADS, CAPACITY, DIM), float("nan"))
    assert torch.equal(
        run(layer, x, nan, nan, torch.tensor([[0]])),
        layer(x, flat_rope(1, 1, 4), None, torch.tensor([[0]])),
    )


def test_without_qk_norm() -> None:
    config = AttentionConfig(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, qk_norm=False, rope=[ROPE])
    assert not any("norm" in name for name in PrefixAttention(HIDDEN, config, 0, 1e-6).state_dict())


# -- the whole drafter over a cache of a target ------------------------------------------------------------------


def ragged_context(target: Target, lengths: list[int], taps: list[int]) -> DraftContext:
    """Rows of different lengths in one cache, as the decoding loop has them."""
    tokens = torch.randint(0, target.vocab_size, (len(lengths), max(lengths) + 1))
    cache = target.new_cache(len(lengths), CAPACITY)
    last = []
    for row, length in enumerate(lengths):
        own = cache.rows(row, row + 1)
        last.append(target.prefill(tokens[row : row + 1, :length], own, taps).taps[0, -1])
        cache.lengths[row] = length
    anchors = torch.stack([tokens[row, length] for row, length in enumerate(lengths)])[:, None]
    return DraftContext(anchors, torch.tensor(lengths)[:, None], torch.stack(last)[:, None], cache.view())


def single_row(context: DraftContext, row: int) -> DraftContext:
    one = slice(row, row + 1)
    view = type(context.kv)([k[one] for k in context.kv.keys], [v[one] for v in context.kv.values], context.kv.lengths[one])
    return DraftContext(context.anchors[one], context.positions[one], context.taps[one], view)


def test_ragged_rows_equal_single_rows(target: Target) -> None:
    drafter = tiny_drafter(target)
    context = ragged_context(target, [3, 25, 11], drafter.taps)
    together, hidden = drafter.propose(context, 5), drafter.backbone(context, 6)
    for row in range(3):
        alone = single_row(context, row)
        assert torch.allclose(drafter.backbone(alone, 6)[0], hidden[row], atol=1e-5)
        assert drafter.propose(alone, 5).tokens.tolist() == together.tokens[row : row + 1].tolist()


def test_proposing_writes_nothing_to_the_cache(target: Target) -> None:
    drafter = tiny_drafter(target)
    context = ragged_context(target, [3, 25], drafter.taps)
    tensors = [*context.kv.keys, *context.kv.values]
    before = [(t.clone(), t._version) for t in tensors]
    drafter.propose(context, 5)
    for tensor, (copy, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy) and tensor._version == version


def test_only_the_reused_layers_are_read(target: Target) -> None:
    drafter = tiny_drafter(target)
    context = ragged_context(target, [20], drafter.taps)
    expected = drafter.backbone(context, 6)
    for layer in range(len(target.layers)):
        if layer not in drafter.config.kv_layers:
            context.kv.keys[layer].fill_(float("nan"))
            context.kv.values[layer].fill_(float("nan"))
    assert torch.equal(drafter.backbone(context, 6), expected)
    context.kv.values[drafter.config.kv_layers[0]].mul_(2.0)
    assert not torch.allclose(drafter.backbone(context, 6), expected)


def test_without_target_kv_the_cache_is_not_touched(target: Target) -> None:
    drafter = tiny_drafter(target, context="none")
    cache = KVCache(CacheShape(len(target.layers), 2, 16), 1, CAPACITY, torch.float32, "cpu")
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    context = ragged_context(target, [20], drafter.taps)
    blind = DraftContext(context.anchors, context.positions, context.taps, cache.view())
    assert torch.equal(drafter.backbone(blind, 6), drafter.backbone(context, 6))
