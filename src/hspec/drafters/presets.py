"""Named H-Spec configurations: the paper's three targets and a compact one for a laptop."""

from __future__ import annotations

from typing import Any

from hspec.drafters.config import AttentionConfig, MambaConfig, MarkovConfig, ParallelConfig, SubLayer, TargetIdentity
from hspec.errors import UsageError

PAPER_PATTERN: list[SubLayer] = ["mamba", "mlp", *(["mamba", "attention", "mlp"] * 3)]  # type: ignore[list-item]
COMPACT_PATTERN: list[SubLayer] = ["mamba", "mlp", *(["mamba", "attention", "mlp"] * 2)]  # type: ignore[list-item]


def _paper(
    name: str, family: str, layers: int, hidden: int, intermediate: int, heads: int, vocab: int, mamba_heads: int, fusion: int,
    taps: list[int], rope: dict[str, Any], eps: float,
) -> ParallelConfig:  # fmt: skip
    return ParallelConfig(
        target=TargetIdentity(name=name, family=family, layers=layers, hidden_size=hidden, vocab_size=vocab),
        pattern=PAPER_PATTERN,
        hidden_size=hidden,
        intermediate_size=intermediate,
        rms_norm_eps=eps,
        block_size=8,
        mamba=MambaConfig(heads=mamba_heads, head_dim=64, state_dim=4, groups=4, conv_kernel=4),
        attention=AttentionConfig(heads=heads, kv_heads=8, head_dim=128, window=2048, rope=[rope] * 3),
        taps=taps,
        kv_layers=taps[-3:],
        fusion_rank=fusion,
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

PRESETS: dict[str, ParallelConfig] = {
    "llama-3.1-8b": _paper(
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama",
        32,
        4096,
        14336,
        32,
        128256,
        56,
        4096,
        [1, 8, 15, 22, 30],
        _LLAMA3_ROPE,
        1e-5,
    ),
    "qwen3-4b": _paper("Qwen/Qwen3-4B", "qwen3", 36, 2560, 9728, 32, 151936, 44, 2560, [1, 9, 17, 25, 34], _QWEN3_ROPE, 1e-6),
    "qwen3-8b": _paper("Qwen/Qwen3-8B", "qwen3", 36, 4096, 12288, 32, 151936, 48, 4096, [1, 9, 17, 25, 34], _QWEN3_ROPE, 1e-6),
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
}


def preset(name: str) -> ParallelConfig:
    """Raises:
    UsageError: no preset of that name.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UsageError(f"no preset {name!r}; there are {', '.join(PRESETS)}") from None
