"""The presets have the sizes that the paper gives, counted without weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hspec.drafters.config import ParallelConfig
from hspec.drafters.parallel import ParallelDrafter
from hspec.drafters.presets import PRESETS, attention_layers, preset, preset_of
from hspec.drafters.rope import Rope
from hspec.errors import UsageError

PAPER = ["llama-3.1-8b", "qwen3-4b", "qwen3-8b"]


def parameters(config: ParallelConfig) -> Counter[str]:
    """Trainable parameters by part."""
    with torch.device("meta"):
        embedding = torch.empty(config.target.vocab_size, config.hidden_size)
        head = torch.empty(config.draft_vocab_size, config.hidden_size)
        drafter = ParallelDrafter(config, embedding, head, torch.empty(config.draft_vocab_size, dtype=torch.int64))
    count: Counter[str] = Counter()
    for name, p in drafter.named_parameters():
        part, *rest = name.split(".")
        count[config.pattern[int(rest[0])] if part == "layers" else part] += p.numel()
    return count


def by_hand(c: ParallelConfig) -> dict[str, int]:
    """The same from the formulas of the parts."""
    h, m, a = c.hidden_size, c.mamba, c.attention
    assert m is not None and a is not None
    d, conv = m.heads * m.head_dim, m.heads * m.head_dim + 2 * m.groups * m.state_dim
    mixer = h * (d + conv + m.heads) + conv * (m.conv_kernel + 1) + 3 * m.heads + d + d * h
    attention = h * a.head_dim * (2 * a.heads + 2 * a.kv_heads) + 2 * a.head_dim * a.qk_norm
    return {
        "mamba": c.pattern.count("mamba") * mixer,
        "attention": c.pattern.count("attention") * attention,
        "mlp": c.pattern.count("mlp") * 3 * h * c.intermediate_size,
        "seed": len(c.taps) * h * (c.fusion_rank + c.fusion_norm) + c.fusion_rank + c.fusion_rank * d * m.state_dim,
        "causal": c.markov_rank * (c.target.vocab_size + c.draft_vocab_size),
        "confidence": h + c.markov_rank + 1,
        "norms": len(c.pattern) * h,
        "norm": h,
        "mask_embedding": h,
    }


def dspark(c: ParallelConfig, layers: int = 5) -> int:
    """Trainable parameters of DSpark on the same target: attention-MLP layers, the fusion of five taps, the same heads."""
    a = c.attention
    assert a is not None
    h = c.hidden_size
    layer = h * a.head_dim * (2 * a.heads + 2 * a.kv_heads) + 2 * a.head_dim + 3 * h * c.intermediate_size + 2 * h
    heads = c.markov_rank * (c.target.vocab_size + c.draft_vocab_size) + h + c.markov_rank + 1
    return layers * layer + len(c.taps) * h * h + 2 * h + heads


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameters_by_part(name: str) -> None:
    assert parameters(PRESETS[name]) == by_hand(PRESETS[name])


@pytest.mark.parametrize(("name", "percent"), zip(PAPER, [-1.9, -1.9, -2.9], strict=True))
def test_parameters_against_dspark(name: str, percent: float) -> None:
    config = PRESETS[name]
    assert 100 * (parameters(config).total() / dspark(config) - 1) == pytest.approx(percent, abs=0.1)


@pytest.mark.parametrize(
    ("name", "heads", "inner", "fusion", "taps", "kv_layers"),
    [
        ("llama-3.1-8b", 56, 3584, 4096, [1, 8, 15, 22, 30], [15, 22, 30]),
        ("qwen3-4b", 44, 2816, 2560, [1, 9, 17, 25, 34], [17, 25, 34]),
        ("qwen3-8b", 48, 3072, 4096, [1, 9, 17, 25, 34], [17, 25, 34]),
    ],
)
def test_as_in_the_paper(name: str, heads: int, inner: int, fusion: int, taps: list[int], kv_layers: list[int]) -> None:
    c = PRESETS[name]
    assert c.mamba is not None and c.attention is not None
    assert (c.mamba.heads, c.mamba.inner, c.fusion_rank) == (heads, inner, fusion)
    assert (c.mamba.head_dim, c.mamba.state_dim, c.mamba.groups, c.mamba.conv_kernel) == (64, 4, 4, 4)
    assert (c.taps, c.kv_layers) == (taps, kv_layers)
    assert (c.block_size, c.max_draft, c.attention.window, c.attention.causal_block) == (8, 7, 2048, True)
    assert (c.draft_vocab_size, c.markov_rank, c.seed_mode) == (32000, 256, "shared")
    assert c.pattern == ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "attention", "mlp", "mamba", "attention", "mlp"]


@pytest.mark.parametrize("name", [*PAPER, "qwen3.5-27b", "qwen3.5-397b-a17b"])
def test_the_papers_rules(name: str) -> None:
    """Taps evenly from the second layer to the last but one, each rounded down; K/V of the last three, or of the nearest layers that
    have any; fusion rank = hidden size; Mamba heads one step of 4 below the most that do not exceed five layers of DSpark."""
    c = PRESETS[name]
    layers = c.target.layers
    assert c.taps == [int(1 + (layers - 3) * i / 4) for i in range(5)]
    full = attention_layers(c.target)
    assert len(full) == (layers // 4 if name.startswith("qwen3.5") else layers)
    assert all(abs(m - tap) == min(abs(other - tap) for other in full) for m, tap in zip(c.kv_layers, c.taps[-3:], strict=True))
    assert c.fusion_rank == c.hidden_size
    assert c.mamba is not None

    def with_heads(heads: int) -> int:
        mamba = c.mamba.model_copy(update={"heads": heads})  # type: ignore[union-attr]
        return parameters(c.model_copy(update={"mamba": mamba})).total()

    most = max(heads for heads in range(4, 128, 4) if with_heads(heads) <= dspark(c))
    assert c.mamba.heads == most - 4


def test_the_hybrid_targets() -> None:
    """As public configurations have them (the docstring of the presets says which)."""
    dense, sparse = PRESETS["qwen3.5-27b"], PRESETS["qwen3.5-397b-a17b"]
    for c, shape in ((dense, (64, 5120, 24, 4)), (sparse, (60, 4096, 32, 2))):
        a = c.attention
        assert a is not None
        assert (c.target.layers, c.hidden_size, a.heads, a.kv_heads) == shape
        assert (a.head_dim, c.target.vocab_size, c.rms_norm_eps) == (256, 248320, 1e-6)
        assert a.rope[0] == {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert (dense.kv_layers, sparse.kv_layers) == ([31, 47, 63], [27, 43, 59])
    with torch.device("meta"):
        assert Rope(dense.attention.rope[0], 256).inverse_frequency.shape == (32,)  # type: ignore[union-attr]


def test_a_preset_of_a_target() -> None:
    for name, c in PRESETS.items():
        assert preset_of(name) is preset_of(c.target.name) is c
    assert preset_of("Qwen/Qwen3-32B") is None


def test_compact_preset_is_small() -> None:
    assert parameters(PRESETS["smollm2-135m"]).total() <= 20_000_000


def test_unknown_preset_names_the_known() -> None:
    with pytest.raises(UsageError, match=r"no preset 'qwen'; there are llama-3.1-8b"):
        preset("qwen")
