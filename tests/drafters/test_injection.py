"""DFlash's injection: what is kept of every context token, what the block sees of it, and the two layouts of a block."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec.drafters.context import DraftContext
from hspec.drafters.parallel import ParallelDrafter
from hspec.targets.cache import KVCache, KVView
from hspec.targets.target import Target
from tests.tiny import tiny_drafter

LENGTH, SLOTS, WINDOW = 25, 4, 12
LAYERS = ["attention", "mlp", "attention", "mlp"]
FLASH: dict[str, Any] = {"pattern": LAYERS, "mamba": None, "use_state": False, "context": "features"}


@pytest.fixture
def flash(target: Target) -> ParallelDrafter:
    return tiny_drafter(target, window=WINDOW, **FLASH)


def run(target: Target, taps: list[int], length: int = LENGTH) -> tuple[Tensor, KVCache]:
    """The taps ``[1, length, F, hidden]`` of a text, and the target's cache after it."""
    cache = target.new_cache(1, length + 8)
    output = target.forward(torch.arange(5, 5 + length)[None], cache, taps)
    cache.advance([length])
    return output.taps, cache


def remember(drafter: ParallelDrafter, taps: Tensor, chunks: list[int]) -> KVView:
    """What is kept of a text that is run in chunks."""
    shape = drafter.memory_shape
    assert shape is not None
    cache, start = KVCache(shape, 1, taps.shape[1] + 8, torch.float32, "cpu"), 0
    for size in chunks:
        part = taps[:, start : start + size]
        kept = drafter.remember(
            part, torch.zeros(1, size, dtype=torch.long), torch.arange(start, start + size)[None], cache.view()
        )
        cache.stage(size)
        for layer, (keys, values) in enumerate(kept):
            cache.update(keys, values, layer)
        cache.advance([size])
        start += size
    return cache.view()


def context_of(target: Target, drafter: ParallelDrafter, chunks: list[int] | None = None) -> DraftContext:
    taps, cache = run(target, drafter.taps)
    memory = remember(drafter, taps, chunks or [LENGTH]) if drafter.memory_shape else None
    return DraftContext(torch.tensor([[7]]), torch.tensor([[LENGTH]]), taps[:, -1:], cache.view(), memory)


# -- what is kept ------------------------------------------------------------------------------------------------


def rotated(x: list[float], position: int, theta: float = 10_000.0) -> list[float]:
    """Pairs (i, i + half) turned by position / theta^(2 i / d)."""
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        angle = position / theta ** (2 * i / len(x))
        a, b = x[i], x[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean() + 1e-6) ** -0.5 * weight


def test_keys_and_values_of_every_position(target: Target, flash: ParallelDrafter) -> None:
    """K = rope(k_norm(W_k C)), V = W_v C with C = RMSNorm(W_fc [taps]), a position and a head at a time."""
    taps, _ = run(target, flash.taps)
    kept = remember(flash, taps, [LENGTH])
    fusion, attention = flash.fusion, [flash.layers[0], flash.layers[2]]
    assert fusion is not None and len(kept.keys) == 2
    for position in (0, 1, 13, LENGTH - 1):
        joined = torch.cat(list(taps[0, position]))
        feature = normed(fusion.fc.weight @ joined, fusion.norm.weight)
        for index, layer in enumerate(attention):
            k, v = layer.k_proj.weight @ feature, layer.v_proj.weight @ feature
            for head in range(2):
                part = slice(16 * head, 16 * head + 16)
                wanted = torch.tensor(rotated(normed(k[part], layer.k_norm.weight).tolist(), position))
                torch.testing.assert_close(kept.keys[index][0, head, position], wanted, atol=2e-4, rtol=1e-4)
                torch.testing.assert_close(kept.values[index][0, head, position], v[part], atol=2e-4, rtol=1e-4)


def test_one_projection_for_context_and_block(target: Target, flash: ParallelDrafter) -> None:
    """The block's own keys go through the same W_k, W_v and k_norm."""
    layer = flash.layers[0]
    x = torch.randn(1, 3, 64)
    rope = flash.ropes[0](torch.arange(3)[None])
    k, v = layer.project(x, rope)
    names = [name for name, _ in flash.named_parameters() if "layers.0." in name]
    assert sorted(n.split(".")[2] for n in names) == ["k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj"]
    assert k.shape == v.shape == (1, 2, 3, 16)


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [9, 16], [24, 1]], ids=str)
def test_chunks_change_nothing(target: Target, flash: ParallelDrafter, chunks: list[int]) -> None:
    whole, parts = context_of(target, flash), context_of(target, flash, chunks)
    assert whole.memory is not None and parts.memory is not None
    for a, b in zip((*whole.memory.keys, *whole.memory.values), (*parts.memory.keys, *parts.memory.values), strict=True):
        torch.testing.assert_close(a[:, :, :LENGTH], b[:, :, :LENGTH])
    torch.testing.assert_close(flash.backbone(whole, SLOTS), flash.backbone(parts, SLOTS))
    assert flash.propose(whole, 5).tokens.tolist() == flash.propose(parts, 5).tokens.tolist()


# -- what the block sees -----------------------------------------------------------------------------------------


def reached(drafter: ParallelDrafter, context: DraftContext, position: int, own: bool = True) -> bool:
    """Whether slots change with what is kept (``own``), or what the target keeps, of a position."""
    view = context.memory if own else context.kv
    assert view is not None
    keys, values = [k.clone() for k in view.keys], [v.clone() for v in view.values]
    for tensor in (*keys, *values):
        tensor[:, :, position] += 3.0
    changed = KVView(keys, values, view.lengths)
    other = replace(context, memory=changed) if own else replace(context, kv=changed)
    return not torch.allclose(drafter.backbone(other, SLOTS), drafter.backbone(context, SLOTS), atol=1e-5)


def test_the_window(target: Target, flash: ParallelDrafter) -> None:
    context = context_of(target, flash)
    seen = [position for position in range(LENGTH + 8) if reached(flash, context, position)]
    assert seen == list(range(LENGTH - WINDOW, LENGTH))
    assert not any(reached(flash, context, position, own=False) for position in range(LENGTH)), "not the target's own K/V"


def test_a_window_for_each_layer(target: Target) -> None:
    drafter = tiny_drafter(target, **FLASH)
    attention = {**drafter.config.model_dump()["attention"], "window": [3, None]}
    drafter = tiny_drafter(target, **{**FLASH, "attention": attention})
    context = context_of(target, drafter)
    assert all(reached(drafter, context, position) for position in range(LENGTH))
    memory = context.memory
    assert memory is not None
    keys = [k.clone() for k in memory.keys]
    keys[0][:, :, : LENGTH - 3] += 3.0  # the first layer does not see these
    blind = replace(context, memory=KVView(keys, memory.values, memory.lengths))
    torch.testing.assert_close(drafter.backbone(blind, SLOTS), drafter.backbone(context, SLOTS))


@pytest.mark.parametrize("causal", [True, False])
def test_what_slots_see_of_each_other(target: Target, causal: bool) -> None:
    base = tiny_drafter(target, **FLASH)
    attention = {**base.config.model_dump()["attention"], "causal_block": causal}
    drafter = tiny_drafter(target, **{**FLASH, "attention": attention})
    context = context_of(target, drafter)
    longer = drafter.backbone(context, SLOTS + 1)[:, :, :SLOTS]
    assert torch.allclose(longer, drafter.backbone(context, SLOTS), atol=1e-5) == causal


def test_the_target_kv_in_place(target: Target) -> None:
    """dflash-kv: the same backbone on the target's own K/V, nothing kept."""
    drafter = tiny_drafter(target, window=WINDOW, **{**FLASH, "context": "target"})
    assert drafter.memory_shape is None and drafter.fusion is None
    context = context_of(target, drafter)
    assert context.memory is None
    seen = [position for position in range(LENGTH + 8) if reached(drafter, context, position, own=False)]
    assert seen == list(range(LENGTH - WINDOW, LENGTH))
    for layer in range(6):
        keys = list(context.kv.keys)
        keys[layer] = keys[layer] + 3.0
        other = replace(context, kv=KVView(keys, context.kv.values, context.kv.lengths))
        same = torch.allclose(drafter.backbone(other, SLOTS), drafter.backbone(context, SLOTS), atol=1e-5)
        assert same == (layer not in drafter.config.kv_layers)


# -- where slots stand and what they predict ---------------------------------------------------------------------


@pytest.mark.parametrize("from_anchor", [False, True])
def test_the_two_layouts(target: Target, from_anchor: bool) -> None:
    """Without: anchor + k masks, slot j for its own position. With: anchor + k - 1 masks, slot j for the token behind it."""
    drafter = tiny_drafter(target, sample_from_anchor=from_anchor, markov_rank=0, confidence_with_markov=False, **FLASH)
    assert drafter.max_draft == 6 - (not from_anchor)
    context, k = context_of(target, drafter), 4
    seen: list[Tensor] = []
    handle = drafter.ropes[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    draft = drafter.propose(context, k)
    handle.remove()
    slots = k if from_anchor else k + 1
    assert seen[0].tolist() == [[[LENGTH + j for j in range(slots)]]]
    hidden = drafter.backbone(context, slots)[0, 0]
    predicting = hidden if from_anchor else hidden[1:]
    assert draft.tokens.tolist() == [drafter.draft_ids[drafter.base_logits(predicting).argmax(-1)].tolist()]


@pytest.mark.parametrize("from_anchor", [False, True])
def test_training_sees_the_slots_that_are_drafted(target: Target, from_anchor: bool) -> None:
    drafter = tiny_drafter(target, sample_from_anchor=from_anchor, **FLASH)
    context, k = context_of(target, drafter), 4
    prediction = drafter.predict(context, torch.tensor([[[7, 1, 2, 3]]]))
    slots = k if from_anchor else k + 1
    hidden = drafter.backbone(context, slots)[:, 0]
    torch.testing.assert_close(prediction.hidden, hidden[:, -k:])
    torch.testing.assert_close(prediction.anchor_hidden, hidden[:, 0])
    assert drafter.causal is not None and prediction.features is not None
    torch.testing.assert_close(prediction.features, drafter.causal.embed(torch.tensor([[7, 1, 2, 3]])))
