"""EAGLE-3 and P-EAGLE: what they compute is what the library ``speculators`` computes, however the context came in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec.drafters.config import EagleConfig, TargetIdentity
from hspec.drafters.context import DraftContext
from hspec.drafters.eagle import EagleDrafter
from hspec.drafters.formats.eagle import weight_names
from hspec.targets.cache import KVCache, KVView
from tests.drafters.speculators_oracle import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    TAPS,
    TARGET_LAYERS,
    VOCABULARY,
    WINDOW,
    Kind,
    Oracle,
    draft_greedily,
    make_drafter,
    make_inputs,
    run,
)

LENGTH, K, TOLERANCE = 30, 4, 5e-5
ANCHORS = ([1], [2, 9], [5, 6, 7, 13, 24])
"""Blocks of one pass; prefixes shorter than the window, as long, and longer."""
NO_TARGET = KVView([], [], ())
FULL, TWO, THREE = ("full",), ("full",) * 2, ("full",) * 3
SLIDING, MIXED = ("sliding",), ("sliding", "full", "sliding")

CASES: list[tuple[Kind, tuple[str, ...], dict[str, Any]]] = [
    ("eagle3", FULL, {}),
    ("eagle3", FULL, {"norm_before_residual": True}),
    ("eagle3", FULL, {"norm_before_fc": True}),
    ("eagle3", FULL, {"fc_norm": True}),
    ("eagle3", FULL, {"norm_output": True}),
    ("eagle3", TWO, {}),
    ("eagle3", TWO, {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}),
    ("eagle3", SLIDING, {}),
    ("eagle3", MIXED, {"fc_norm": True, "norm_output": True}),
    ("peagle", TWO, {}),
    ("peagle", TWO, {"norm_before_fc": True}),
    ("peagle", TWO, {"fc_norm": True}),
    ("peagle", THREE, {"norm_before_residual": True}),
]


def ours(oracle: Oracle) -> EagleDrafter:
    """The oracle's weights in our modules; its window counts the row itself, ours the rows before it."""
    raw, layer = oracle.raw, oracle.raw["transformer_layer_config"]
    windows = [WINDOW - 1 if kind == "sliding_attention" else None for kind in layer["layer_types"]]
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    identity = {"name": "x", "family": layer["model_type"], "layers": TARGET_LAYERS}
    attention = {
        "context": "features", "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "window": windows,
        "qk_norm": layer["model_type"] == "qwen3", "rope": [layer["rope_parameters"]] * len(windows),
    }  # fmt: skip
    config = EagleConfig.model_validate(
        {
            "method": oracle.kind, "target": TargetIdentity(**identity, hidden_size=HIDDEN, vocab_size=VOCABULARY).model_dump(),
            "hidden_size": HIDDEN, "rms_norm_eps": layer["rms_norm_eps"], "block_size": K + 1, "taps": list(TAPS),
            "draft_vocab_size": len(oracle.draft_ids), "layers": len(windows), "intermediate_size": INTERMEDIATE,
            "attention": attention, "kv_layers": [0] * len(windows), **{name: raw[name] for name in names},
        }
    )  # fmt: skip
    drafter, stored = EagleDrafter(config, oracle.embedding, oracle.head, oracle.draft_ids), oracle.tensors
    weights = {mine: stored[theirs] for theirs, mine in weight_names(config).items()}
    if oracle.kind == "peagle":
        weights["mask_hidden"] = weights["mask_hidden"].view(len(TAPS), HIDDEN)
        weights["mask_embedding"] = oracle.embedding[raw["mask_token_id"]]
    drafter.load_state_dict(weights)
    return drafter.eval().requires_grad_(False)


def made(tmp_path: Path, kind: Kind, layers: tuple[str, ...], family: Any = "qwen3", **flags: Any) -> Oracle:
    kinds: Any = layers
    return make_drafter(kind, tmp_path, seed=3, family=family, layer_types=kinds, **flags)


def remembered(drafter: EagleDrafter, tokens: Tensor, taps: Tensor, chunks: tuple[int, ...] = (LENGTH,)) -> KVCache:
    """What is kept of all rows of ``tokens`` ``[B, LENGTH]``, put in by chunks that end there."""
    cache = KVCache(drafter.memory_shape, len(tokens), LENGTH + 8, torch.float32, "cpu")
    following = tokens.roll(-1, 1)  # behind the last one stands nothing that is read
    for start, end in zip((0, *chunks), chunks, strict=False):
        positions = torch.arange(start, end).expand(len(tokens), -1)
        kept = drafter.remember(taps[:, start:end], following[:, start:end], positions, cache.view())
        put(cache, kept)
    return cache


def put(cache: KVCache, kept: list[tuple[Tensor, Tensor]]) -> None:
    count = kept[0][0].shape[2]
    cache.stage(count)
    for layer, (keys, values) in enumerate(kept):
        cache.update(keys, values, layer)
    cache.advance([count] * cache.batch)


def context(tokens: Tensor, taps: Tensor, memory: KVCache, anchors: list[int]) -> DraftContext:
    """Blocks of a sequence ``[1, LENGTH]``."""
    at = torch.tensor([anchors])
    return DraftContext(tokens[0, at], at, taps[0, at - 1], NO_TARGET, memory.view())


def forced(drafter: EagleDrafter, tokens: Tensor, taps: Tensor, memory: KVCache, anchors: list[int]) -> Tensor:
    """Logits ``[A, K, Vd]`` of training's pass, true tokens before every slot."""
    previous = tokens[0, torch.tensor([anchors])[..., None] + torch.arange(K)]
    hidden = drafter.predict(context(tokens, taps, memory, anchors), previous).hidden
    return drafter.base_logits(hidden).view(len(anchors), K, -1)


# -- against the library ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind, layers, flags", CASES, ids=str)
def test_the_librarys_logits(kind: Kind, layers: tuple[str, ...], flags: dict[str, Any], family: str, tmp_path: Path) -> None:
    """Of true tokens, and of its own greedy drafts; with what is kept of the context put in at once, or bit by bit."""
    oracle = made(tmp_path, kind, layers, family, **flags)
    drafter, (tokens, taps) = ours(oracle), make_inputs(LENGTH, 1)
    at_once = remembered(drafter, tokens, taps)
    in_chunks = remembered(drafter, tokens, taps, (7, 8, 20, LENGTH))
    for anchors in ANCHORS:
        expected = run(oracle, tokens, taps, anchors, K).logits
        for memory in (at_once, in_chunks):
            torch.testing.assert_close(forced(drafter, tokens, taps, memory, anchors), expected, atol=TOLERANCE, rtol=1e-4)
    for anchor in (1, 6, 24):
        memory = remembered(drafter, tokens, taps, (5, LENGTH))
        memory.lengths = [anchor - 1]
        drafted = drafter.propose(context(tokens, taps, memory, [anchor]), K)
        assert drafted.tokens[0].tolist() == draft_greedily(oracle, tokens, taps, anchor, K)


def test_cases_differ(tmp_path: Path) -> None:
    """Every flag and every window has its part in the numbers that are compared."""
    inputs = make_inputs(LENGTH, 1)
    found = []
    for i, (kind, layers, flags) in enumerate(CASES):
        oracle = made(tmp_path / str(i), kind, layers, **flags)
        found.append(run(oracle, *inputs, [24], K).logits)
    for i, one in enumerate(found):
        assert all(float((one - other).abs().max()) > 100 * TOLERANCE for other in found[:i])


def test_a_window_counts_the_rows_before_the_first_slots(tmp_path: Path) -> None:
    """For all steps of the chain alike: the library's W less one, which is the row itself."""
    drafter, (tokens, taps) = ours(made(tmp_path, "eagle3", SLIDING)), make_inputs(LENGTH, 1)
    memory = remembered(drafter, tokens, taps)
    before = forced(drafter, tokens, taps, memory, [20])
    for row in range(LENGTH):
        memory = remembered(drafter, tokens, taps)
        for tensor in (*memory.keys, *memory.values):
            tensor[:, :, row] += 1
        changed = (forced(drafter, tokens, taps, memory, [20]) - before).abs().amax(-1)[0] > 1e-4
        assert changed.tolist() == [19 - (WINDOW - 1) <= row < 19] * K


# -- batches, and what is kept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, layers", [("eagle3", MIXED), ("peagle", THREE)])
def test_sequences_of_unequal_lengths(kind: Kind, layers: tuple[str, ...], tmp_path: Path) -> None:
    """Drafted together as alone; and so they are remembered, beside longer and shorter ones."""
    drafter, lengths = ours(made(tmp_path, kind, layers)), [3, 17, 9]
    tokens, taps = (torch.cat(parts) for parts in zip(*(make_inputs(LENGTH, seed) for seed in range(3)), strict=True))
    together = remembered(drafter, tokens, taps)
    together.lengths = list(lengths)
    more, following = torch.tensor(lengths)[:, None] + torch.arange(4), tokens.roll(-1, 1)
    row = torch.arange(3)[:, None]
    put(together, drafter.remember(taps[row, more], following[row, more], more, together.view()))
    at = torch.tensor(together.lengths)[:, None]
    drafted = drafter.propose(DraftContext(tokens[row, at], at, taps[row, at - 1], NO_TARGET, together.view()), K)
    for b, length in enumerate(lengths):
        own = slice(b, b + 1)
        alone = remembered(drafter, tokens[own], taps[own])
        for mine, theirs in zip((*together.keys, *together.values), (*alone.keys, *alone.values), strict=True):
            torch.testing.assert_close(mine[b, :, : length + 4], theirs[0, :, : length + 4], atol=1e-5, rtol=1e-5)
        alone.lengths = [length + 4]
        expected = drafter.propose(context(tokens[own], taps[own], alone, [length + 4]), K)
        assert torch.equal(drafted.tokens[own], expected.tokens)


@pytest.mark.parametrize("kind, layers", [("eagle3", FULL), ("eagle3", MIXED), ("peagle", THREE)])
def test_a_row_is_kept_whatever_comes_behind_its_following_token(kind: Kind, layers: tuple[str, ...], tmp_path: Path) -> None:
    """Row 11 knows tokens up to 12 and hidden states up to 11."""
    drafter, (tokens, taps) = ours(made(tmp_path, kind, layers)), make_inputs(LENGTH, 1)
    before = remembered(drafter, tokens, taps)
    later, known = (tokens.clone(), taps.clone()), (tokens.clone(), taps.clone())
    later[0][:, 13:] = (tokens[:, 13:] + 1) % VOCABULARY
    later[1][:, 12:] += 1
    known[0][:, 12] = (tokens[:, 12] + 1) % VOCABULARY
    for (other_tokens, other_taps), same in ((later, 12), (known, 11)):
        after = remembered(drafter, other_tokens, other_taps)
        for mine, theirs in zip((*after.keys, *after.values), (*before.keys, *before.values), strict=True):
            assert torch.equal(mine[:, :, :same], theirs[:, :, :same])
            assert not torch.isclose(mine[:, :, same], theirs[:, :, same]).all()


def test_a_block_reads_nothing_of_what_is_kept_from_its_anchor_on(tmp_path: Path) -> None:
    """Its first slot's row it computes itself."""
    drafter, (tokens, taps) = ours(made(tmp_path, "eagle3", TWO)), make_inputs(LENGTH, 1)
    memory = remembered(drafter, tokens, taps)
    before = forced(drafter, tokens, taps, memory, [5, 12])
    for tensor in (*memory.keys, *memory.values):
        tensor[:, :, 11:] += 1
    assert torch.equal(forced(drafter, tokens, taps, memory, [5, 12]), before)


def test_what_is_kept_has_gradients(tmp_path: Path) -> None:
    """Training goes through the context, the first layer's output included."""
    drafter, (tokens, taps) = ours(made(tmp_path, "eagle3", TWO)).requires_grad_(True), make_inputs(LENGTH, 1)
    positions = torch.arange(LENGTH)[None]
    kept = drafter.remember(taps, tokens.roll(-1, 1), positions, None)
    kept[-1][0].sum().backward()
    assert float(drafter.layers[0].mlp.down_proj.weight.grad.abs().max()) > 0  # type: ignore[union-attr, operator]
    assert float(drafter.fc.weight.grad.abs().max()) > 0  # type: ignore[union-attr]
