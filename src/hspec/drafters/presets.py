"""Named H-Spec configurations: the paper's three targets, the two hybrid ones that it counts K/V for, a compact one for a laptop.

Where the numbers of the Qwen3.5 pair come from. Layers, hidden size, heads, K/V heads, head size, partial rotation, RoPE's base,
epsilon and vocabulary are those of public launch scripts for the two models (THUDM/slime, ``scripts/models/qwen3.5-27B.sh`` and
``qwen3.5-397B-A17B.sh``), and agree with the K/V bytes that the paper gives (64 and 30 KiB a token). That every fourth layer has
full attention is transformers' default for the family. The paper trains no drafter for them, so the drafter's sizes are our
extension of its rules: taps evenly from the second layer to the last but one; K/V of the full-attention layers nearest to the last
three taps (the lower one of two equally near); fusion rank = hidden size; as many Mamba heads as the rule gives that its three
counts (56, 44, 48) follow: in steps of 4, one step below the most with which H-Spec has no more parameters than a 5-layer DSpark.
The 397B target is a mixture of experts and has no MLP width; ours is what one token passes, (10 routed + 1 shared) experts x 1024.
These targets cannot be run here (:data:`hspec.targets.target.FAMILIES`): the two serve for counting.
"""

from __future__ import annotations

from typing import Any

from hspec.drafters.config import AttentionConfig, MambaConfig, MarkovConfig, ParallelConfig, SubLayer, TargetIdentity
from hspec.errors import UsageError

PAPER_PATTERN: list[SubLayer] = ["mamba", "mlp", *(["mamba", "attention", "mlp"] * 3)]  # type: ignore[list-item]
COMPACT_PATTERN: list[SubLayer] = ["mamba", "mlp", *(["mamba", "attention", "mlp"] * 2)]  # type: ignore[list-item]


FULL_ATTENTION = {"Qwen/Qwen3.5-27B": 4, "Qwen/Qwen3.5-397B-A17B": 4}
"""Of targets with layers of linear attention: every n-th layer has full attention, and so K/V that can be read."""


PUBLISHED_INJECTION = {"Qwen/Qwen3.5-27B": (6, 8, 128), "Qwen/Qwen3.5-397B-A17B": (6, 8, 128)}
"""Layers, K/V heads and head size of the DFlash drafters that the paper counts for targets of another K/V shape: it gives 24 KiB a
token, 6,144 elements of K, which this makes. That it is just this product is an assumption, their configurations are not at hand."""


def attention_layers(target: TargetIdentity) -> list[int]:
    """The layers of a target that keep K/V, as far as is known without its configuration."""
    every = FULL_ATTENTION.get(target.name, 1)
    return [layer for layer in range(target.layers) if (layer + 1) % every == 0]


def nearest(layers: list[int], wanted: int) -> int:
    """Of ascending layers the one nearest to ``wanted``, the lower of two."""
    return min(layers, key=lambda layer: abs(layer - wanted))


def _paper(
    name: str, family: str, layers: int, hidden: int, intermediate: int, heads: int, vocab: int, mamba_heads: int,
    taps: list[int], rope: dict[str, Any], eps: float, kv_heads: int = 8, head_dim: int = 128,
) -> ParallelConfig:  # fmt: skip
    target = TargetIdentity(name=name, family=family, layers=layers, hidden_size=hidden, vocab_size=vocab)
    return ParallelConfig(
        target=target,
        pattern=PAPER_PATTERN,
        hidden_size=hidden,
        intermediate_size=intermediate,
        rms_norm_eps=eps,
        block_size=8,
        mamba=MambaConfig(heads=mamba_heads, head_dim=64, state_dim=4, groups=4, conv_kernel=4),
        attention=AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=2048, rope=[rope] * 3),
        taps=taps,
        kv_layers=[nearest(attention_layers(target), tap) for tap in taps[-3:]],
        fusion_rank=hidden,
        draft_vocab_size=32000,
        head=MarkovConfig(rank=256),
    )


_QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN35_ROPE = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
"""Its three position sections are one and the same for text."""

PRESETS: dict[str, ParallelConfig] = {
    "llama-3.1-8b": _paper(
        "meta-llama/Llama-3.1-8B-Instruct", "llama", 32, 4096, 14336, 32, 128256, 56, [1, 8, 15, 22, 30], _LLAMA3_ROPE, 1e-5,
    ),
    "qwen3-4b": _paper("Qwen/Qwen3-4B", "qwen3", 36, 2560, 9728, 32, 151936, 44, [1, 9, 17, 25, 34], _QWEN3_ROPE, 1e-6),
    "qwen3-8b": _paper("Qwen/Qwen3-8B", "qwen3", 36, 4096, 12288, 32, 151936, 48, [1, 9, 17, 25, 34], _QWEN3_ROPE, 1e-6),
    "qwen3.5-27b": _paper(
        "Qwen/Qwen3.5-27B", "qwen3_5_text", 64, 5120, 17408, 24, 248320, 72, [1, 16, 31, 46, 62], _QWEN35_ROPE, 1e-6, 4, 256,
    ),
    "qwen3.5-397b-a17b": _paper(
        "Qwen/Qwen3.5-397B-A17B", "qwen3_5_moe_text", 60, 4096, 11 * 1024, 32, 248320, 60, [1, 15, 29, 43, 58], _QWEN35_ROPE,
        1e-6, 2, 256,
    ),
    "smollm2-135m": ParallelConfig(
        target=TargetIdentity(name="smollm2-135m-instruct-q4", family="llama", layers=30, hidden_size=576, vocab_size=49152),
        pattern=COMPACT_PATTERN,
        hidden_size=576,
        intermediate_size=1536,
        rms_norm_eps=1e-5,
        block_size=5,
        mamba=MambaConfig(heads=9, head_dim=64, state_dim=4, groups=3, conv_kernel=4),
        attention=AttentionConfig(
            heads=9, kv_heads=3, head_dim=64, window=2048, rope=[{"rope_type": "default", "rope_theta": 100_000.0}] * 2
        ),
        taps=[1, 8, 14, 21, 28],
        kv_layers=[21, 28],
        fusion_rank=576,
        fusion_norm=True,
        draft_vocab_size=16384,
        head=MarkovConfig(rank=48),
    ),
}  # fmt: skip


def preset(name: str) -> ParallelConfig:
    """Raises:
    UsageError: no preset of that name.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UsageError(f"no preset {name!r}; there are {', '.join(PRESETS)}") from None


def preset_of(target: str) -> ParallelConfig | None:
    """The preset of a target by its own name or the preset's, if there is one; nothing is fetched."""
    return PRESETS.get(target) or next((p for p in PRESETS.values() if p.target.name == target), None)
