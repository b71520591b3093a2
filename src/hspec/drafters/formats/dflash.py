"""DFlash and its kin in the layout of ``speculators``: the types ``dflash``, ``dspark`` and ``dflash2``.

All three are layers of attention and MLP on K/V that they project from fused hidden states of the target; they differ in the
causal head and in what else the layers have. docs/speculators-format.md says what each key and tensor means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hspec.drafters.config import AttentionConfig, MarkovConfig, ParallelConfig, SelectorConfig
from hspec.drafters.formats.envelope import (
    ascending_taps,
    check_token,
    common_fields,
    layer_windows,
    one_or_all,
    refuse_unknown,
    rope_refusals,
    shared_rope,
    transformer_config,
    transformer_fields,
    validated,
)
from hspec.errors import HSpecError, UsageError
from hspec.targets.cache import head_dim_of
from hspec.targets.target import Target

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}
TAPS = "aux_hidden_state_layer_ids"

_KEYS = {TAPS, "mask_token_id", "block_size", "sample_from_anchor", "sliding_window_non_causal"}
_DSPARK_KEYS = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
_DFLASH2_KEYS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
_READ = {"dflash": _KEYS, "dspark": _KEYS | _DSPARK_KEYS, "dflash2": _KEYS | _DFLASH2_KEYS}
_VARIANTS = {"vanilla": "vanilla", "gated": "gated", "rnn": "recurrent"}
"""The layout's ``markov_head_type`` -> ours."""


# -- reading -----------------------------------------------------------------------------------------------------


def dflash_config(raw: Mapping[str, Any], layers: int, family: str | None, where: str) -> ParallelConfig:
    """A parsed ``config.json`` as this project's configuration; see :func:`hspec.drafters.formats.authors.authors_config`."""
    kind = raw["speculators_model_type"]
    refuse_unknown(raw, _READ[kind], where)
    transformer = transformer_config(raw, where)
    fields = common_fields(raw, transformer, layers, family)
    count = transformer.num_hidden_layers
    taps = ascending_taps(raw, TAPS, where)
    fields |= {
        "method": kind,
        "pattern": ["attention", "mlp"] * count,
        "block_size": raw.get("block_size", 8),
        "sample_from_anchor": raw.get("sample_from_anchor", kind == "dspark"),
        "mamba": None,
        "attention": _attention(raw, transformer, where),
        "taps": taps,
        "kv_layers": [min(max(taps, default=0), layers - 1)] * count,  # where training began; the layout does not say
        "fusion_rank": transformer.hidden_size,
        "use_state": False,
    }
    config = validated(ParallelConfig, fields | _heads(raw, where), where)
    if kind == "dflash2" and config.draft_vocab_size != config.target.vocab_size:
        raise HSpecError(
            f"{where}: draft_vocab_size {config.draft_vocab_size} of {config.target.vocab_size}, but dflash2 drafts the whole "
            f"vocabulary: the file is damaged"
        )
    return validated(ParallelConfig, {**config.model_dump(), "mask_token_id": _mask(raw, config, where)}, where)


def _mask(raw: Mapping[str, Any], config: ParallelConfig, where: str) -> int:
    return check_token(raw.get("mask_token_id"), config, where)


def _attention(raw: Mapping[str, Any], transformer: Any, where: str) -> dict[str, Any]:
    """Layers with a window are causal within the block unless ``sliding_window_non_causal``; the others are bidirectional."""
    windows = layer_windows(transformer, where)
    non_causal = raw.get("sliding_window_non_causal", raw["speculators_model_type"] == "dflash2")
    return {
        "context": "features",
        "heads": transformer.num_attention_heads,
        "kv_heads": transformer.num_key_value_heads,
        "head_dim": head_dim_of(transformer),
        "qk_norm": True,
        "window": one_or_all(windows),
        "causal_block": one_or_all([w is not None and not non_causal for w in windows]),
        "rope": [shared_rope(transformer, where)] * len(windows),
    }


def _heads(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What stands on top of the layers of each type, and in them."""
    kind = raw["speculators_model_type"]
    if kind == "dflash2":
        return {
            "head": {"kind": "selector", "rank": raw.get("selector_rank", 256), "candidates": raw.get("selector_top_k", 16)},
            "convolution": {"kernel": raw.get("conv_kernel_size", 2), "group": raw.get("conv_group_size", 16)},
            "confidence_head": False,
            "confidence_with_markov": False,
        }
    rank = raw.get("markov_rank", 256) if kind == "dspark" else 0
    variant = raw.get("markov_head_type", "vanilla")
    if rank and variant not in _VARIANTS:
        raise UsageError(
            f"{where}: markov_head_type {variant!r} is not known, {', '.join(_VARIANTS)} are: choose another drafter"
        )
    confident = kind == "dspark" and raw.get("enable_confidence_head", True)
    return {
        "head": {"kind": "markov", "rank": rank, "variant": _VARIANTS[variant]} if rank else None,
        "confidence_head": confident,
        "confidence_with_markov": confident and raw.get("confidence_head_with_markov", True),
    }


def weight_names(config: ParallelConfig) -> dict[str, str]:
    """The layout's name of every tensor of a drafter -> its name in :class:`ParallelDrafter`."""
    names = {"norm.weight": "norm.weight", "fc.weight": "fusion.fc.weight", "hidden_norm.weight": "fusion.norm.weight"}
    for n in range(len(config.pattern) // 2):
        attention, mlp, theirs = 2 * n, 2 * n + 1, f"layers.{n}."
        names[theirs + "input_layernorm.weight"] = f"norms.{attention}.weight"
        names[theirs + "post_attention_layernorm.weight"] = f"norms.{mlp}.weight"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            names[f"{theirs}self_attn.{part}.weight"] = f"layers.{attention}.{part}.weight"
        for part in ("gate_proj", "up_proj", "down_proj"):
            names[f"{theirs}mlp.{part}.weight"] = f"layers.{mlp}.{part}.weight"
        if config.convolution is not None:
            for name, index in (("attention_conv", attention), ("mlp_conv", mlp)):
                for part in ("base_kernel", "kernel_projection.weight"):
                    names[f"{theirs}{name}.{part}"] = f"convolutions.{index}.{part}"
    if config.confidence_head:
        names |= {f"confidence_head.proj.{part}": f"confidence.proj.{part}" for part in ("weight", "bias")}
    return names | _head_names(config)


def _head_names(config: ParallelConfig) -> dict[str, str]:
    if isinstance(config.head, SelectorConfig):
        names = {f"candidate_selector.{part}_codebook": f"causal.{part}" for part in ("predecessor", "successor")}
        return names | {"candidate_selector.hidden_projection.weight": "causal.hidden_projection.weight"}
    if not isinstance(config.head, MarkovConfig):
        return {}
    names = {f"markov_head.markov_w{n}.weight": f"causal.w{n}.weight" for n in (1, 2)}
    linear = {"gated": ("gate_proj", "gate"), "recurrent": ("joint_proj", "joint")}.get(config.head.variant)
    if linear is not None:
        names |= {f"markov_head.{linear[0]}.{part}": f"causal.{linear[1]}.{part}" for part in ("weight", "bias")}
    return names


# -- writing -----------------------------------------------------------------------------------------------------


def dflash_kind(config: ParallelConfig) -> str:
    """The type that has a drafter's causal head."""
    if isinstance(config.head, SelectorConfig) or config.convolution is not None:
        return "dflash2"
    return "dspark" if isinstance(config.head, MarkovConfig) or config.confidence_head else "dflash"


def refusals(config: ParallelConfig) -> list[str]:
    """What of a drafter none of the types can say."""
    kind, head = dflash_kind(config), config.head
    wrong = []
    if config.pattern != ["attention", "mlp"] * (len(config.pattern) // 2):
        own = "; for Mamba there is the authors' layout" if "mamba" in config.pattern else ""
        wrong.append(f"its pattern ({' '.join(config.pattern)}; they have attention and mlp by turns{own})")
    if head is not None and not isinstance(head, MarkovConfig | SelectorConfig):
        wrong.append(f"its causal head ({head.kind}; they have a Markov head or a path selector)")
    if config.fusion_norm:
        wrong.append("a norm of each tap before the fusion (fusion_norm)")
    if config.fusion_rank != config.hidden_size:
        wrong.append(f"its fusion_rank {config.fusion_rank} (theirs is the hidden size, {config.hidden_size})")
    if kind == "dflash2":
        if config.convolution is None or not isinstance(head, SelectorConfig):
            wrong.append("a path selector without convolution, or one without the other")
        if config.confidence_head:
            wrong.append("a confidence head on a path selector")
        if config.draft_vocab_size != config.target.vocab_size:
            wrong.append(f"a path selector over part of the vocabulary (draft_vocab_size {config.draft_vocab_size})")
    return wrong + (_attention_refusals(config, config.attention) if config.attention is not None else ["no attention"])


def _attention_refusals(config: ParallelConfig, attention: AttentionConfig) -> list[str]:
    wrong = rope_refusals(attention)
    if attention.context != "features":
        wrong.append(f"attention over what it does not project itself (attention.context: {attention.context})")
    if not attention.qk_norm:
        wrong.append("queries and keys without a norm (attention.qk_norm)")
    count = len(config.kv_layers)
    rules = {(attention.window_of(i), attention.causal_of(i)) for i in range(count)}
    if (None, True) in rules:
        wrong.append("causal blocks without a window (a layer without one is bidirectional there)")
    if len({rule for rule in rules if rule[0] is not None}) > 1:
        wrong.append("layers with different windows, or of which some are causal within the block")
    return wrong


def dflash_fields(config: ParallelConfig, target: Target) -> dict[str, Any]:
    """The type's own keys of a configuration without :func:`refusals`; :func:`dflash_config` reads them back."""
    assert config.attention is not None
    attention, count = config.attention, len(config.kv_layers)
    windows = [attention.window_of(i) for i in range(count)]
    non_causal = not any(attention.causal_of(i) for i in range(count))
    fields: dict[str, Any] = {
        "transformer_layer_config": transformer_fields(config, config.intermediate_size, attention, windows, target),
        TAPS: list(config.taps),
        "block_size": config.block_size,
        # Servers and types have different defaults for these two: never left out.
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": non_causal,
    }
    kind, head = dflash_kind(config), config.head
    if kind == "dspark":
        variants = {ours: theirs for theirs, ours in _VARIANTS.items()}
        fields |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": variants[head.variant] if isinstance(head, MarkovConfig) else "vanilla",
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_head and config.confidence_with_markov,
        }
    if kind == "dflash2":
        assert config.convolution is not None and isinstance(head, SelectorConfig)
        fields |= {
            "conv_kernel_size": config.convolution.kernel,
            "conv_group_size": config.convolution.group,
            "selector_rank": head.rank,
            "selector_top_k": head.candidates,
        }
    return fields
