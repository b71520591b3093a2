"""What ``hspec info`` says of a target, a drafter or a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hspec.drafters.checkpoint import CONFIG_FILE, known_config
from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.drafters.family import meta_drafter
from hspec.drafters.parameters import layout, parameters_by_part
from hspec.drafters.presets import PRESETS, attention_layers
from hspec.targets.cache import CacheShape
from hspec.targets.sources import describe as target_config


def describe(source: str) -> dict[str, Any]:
    """Facts by name; works from configurations alone, no weights are read.

    Raises:
        UsageError: the source is nothing of the kind.
    """
    if source in PRESETS:
        return {
            "kind": "preset",
            **describe_drafter(PRESETS[source]),
            "target_kv_bytes_per_token": target_bytes(PRESETS[source]),
        }
    folder = Path(source).expanduser()
    if _is_drafter(folder / CONFIG_FILE):
        return {"kind": "drafter", **describe_drafter(known_config(folder))}
    return {"kind": "target", **describe_target(target_config(source))}


def _is_drafter(path: Path) -> bool:
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return '"method"' in text or '"speculators_model_type"' in text


def describe_target(config: Any) -> dict[str, Any]:
    shape = CacheShape.of(config)
    embedding = config.vocab_size * config.hidden_size
    attention = config.hidden_size * shape.head_dim * (config.num_attention_heads + config.num_key_value_heads) * 2
    mlp = 3 * config.hidden_size * config.intermediate_size
    parts = {
        "embedding": embedding,
        "attention": attention * config.num_hidden_layers,
        "mlp": mlp * config.num_hidden_layers,
        "lm_head": 0 if config.tie_word_embeddings else embedding,
    }
    return {
        "family": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "kv_bytes_per_token_fp32": shape.bytes_per_token(torch.float32),
        "kv_bytes_per_token_bf16": shape.bytes_per_token(torch.bfloat16),
    }


def describe_drafter(config: DrafterConfig) -> dict[str, Any]:
    parts = parameters_by_part(config)
    return {
        "method": config.method,
        "target": config.target.name,
        "pattern": layout(config),
        "block": f"anchor + {config.max_draft}",
        "window": getattr(config, "attention", None) and config.attention.window,  # type: ignore[attr-defined]
        "taps": ", ".join(map(str, config.taps)),
        "kv_layers": ", ".join(map(str, getattr(config, "kv_layers", []))),
        "draft_vocab_size": config.draft_vocab_size,
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "kv_bytes_per_token": memory_bytes(config),
    }


def memory_bytes(config: DrafterConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """What a drafter keeps of every context token, besides what the target keeps."""
    shape = meta_drafter(config).memory_shape
    return 0 if shape is None else shape.bytes_per_token(dtype)


def target_bytes(preset: ParallelConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """What a preset's target keeps of every context token."""
    attention = preset.attention
    assert attention is not None and attention.context == "target"
    return CacheShape(len(attention_layers(preset.target)), attention.kv_heads, attention.head_dim).bytes_per_token(dtype)
