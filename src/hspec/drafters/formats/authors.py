"""H-Spec checkpoints as its authors publish them: ``speculators`` layout, type ``mamba_attn_hybrid``. See docs/checkpoints.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hspec.drafters.config import AttentionConfig, MambaConfig, MarkovConfig, ParallelConfig
from hspec.drafters.formats.envelope import (
    ascending_taps,
    common_fields,
    layer_ids,
    refuse_unknown,
    transformer_config,
    transformer_fields,
    validated,
)
from hspec.drafters.formats.files import CONFIG_FILE
from hspec.errors import HSpecError, UsageError
from hspec.targets.cache import head_dim_of
from hspec.targets.target import Target

MODEL_TYPE = "mamba_attn_hybrid"
ARCHITECTURE = "MambaAttnHybridDraftModel"

_READ = {
    "block_pattern", "block_size", "attn_kv_layer_ids", "latent_fusion_layer_ids", "attn_rope", "mamba_num_heads",
    "mamba_head_dim", "mamba_d_state", "mamba_n_groups", "mamba_conv_kernel", "mamba_seed_mode", "mask_token_id", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "use_qk_norm", "fc_norm",
    "sliding_window_non_causal", "disable_mamba_init_state_injection", "disable_target_kv_reuse",
}  # fmt: skip
_WITHOUT_EFFECT = {
    # how it was trained, and what can be derived from the rest
    "max_anchors", "trainable_q_proj", "trainable_kv_proj", "trainable_q_norm", "trainable_k_norm", "init_q_proj",
    "init_kv_proj", "init_q_norm", "init_k_norm", "agg_mode", "mamba_expand", "aux_hidden_state_layer_ids",
    "verifier_layer_prefix",
}  # fmt: skip


def is_authors(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed ``config.json`` is a checkpoint of H-Spec's authors."""
    return raw.get("speculators_model_type") == MODEL_TYPE


# -- reading -----------------------------------------------------------------------------------------------------


def authors_config(raw: Mapping[str, Any], layers: int, family: str | None = None, where: str = CONFIG_FILE) -> ParallelConfig:
    """A parsed ``config.json`` of the layout as this project's configuration.

    Args:
        layers: how many decoder layers the target has; the layout does not say.
        family: the target's model type; by default what the layout's verifier says.
        where: named in errors.

    Raises:
        UsageError: another type of drafter, or a setting that is not supported.
        HSpecError: the configuration contradicts itself.
    """
    if not is_authors(raw):
        raise UsageError(f"{where}: a drafter of the type {raw.get('speculators_model_type')!r}, not {MODEL_TYPE!r}")
    refuse_unknown(raw, _READ | _WITHOUT_EFFECT, where)
    transformer = transformer_config(raw, where)
    pattern = _pattern(raw, where)
    attentions = pattern.count("attention")
    kv_layers = layer_ids(raw, "attn_kv_layer_ids", where)
    if not len(kv_layers) == attentions == transformer.num_hidden_layers:
        raise HSpecError(
            f"{where}: block_pattern has {attentions} attention sub-layers, attn_kv_layer_ids {len(kv_layers)} entries and "
            f"transformer_layer_config {transformer.num_hidden_layers} layers; they must be as many: the file is damaged"
        )
    markov_rank = raw.get("markov_rank", 0)
    if markov_rank and raw.get("markov_head_type", "vanilla") != "vanilla":
        raise UsageError(
            f"{where}: markov_head_type {raw['markov_head_type']!r} is not supported, only 'vanilla' is: choose another drafter"
        )
    fields = common_fields(raw, transformer, layers, family) | {
        "method": _method(raw, pattern),
        "pattern": pattern,
        "block_size": raw.get("block_size", 8),
        "mamba": _mamba(raw) if "mamba" in pattern else None,
        "attention": _attention(raw, transformer, attentions, where) if attentions else None,
        "taps": _taps(raw, kv_layers, layers, where),
        "kv_layers": kv_layers,
        "fusion_rank": transformer.hidden_size,
        "fusion_norm": raw.get("fc_norm", False),
        "seed_mode": raw.get("mamba_seed_mode", "per_layer"),
        "head": {"kind": "markov", "rank": markov_rank} if markov_rank else None,
        "confidence_head": raw.get("enable_confidence_head", False),
        "confidence_with_markov": raw.get("confidence_head_with_markov", False),
        "use_state": not raw.get("disable_mamba_init_state_injection", False),
    }
    return validated(ParallelConfig, fields, where)


def _method(raw: Mapping[str, Any], pattern: list[str]) -> str:
    """The name under which this choice of parts is known here."""
    if "attention" not in pattern:
        return "mamba-only"
    if "mamba" not in pattern:
        return "attention-only"
    if raw.get("disable_mamba_init_state_injection", False):
        return "hspec-no-state"
    return "hspec-no-kv" if raw.get("disable_target_kv_reuse", False) else "hspec"


def _mamba(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "heads": raw.get("mamba_num_heads", 64),
        "head_dim": raw.get("mamba_head_dim", 64),
        "state_dim": raw.get("mamba_d_state", 16),
        "groups": raw.get("mamba_n_groups", 1),
        "conv_kernel": raw.get("mamba_conv_kernel", 4),
    }


def _attention(raw: Mapping[str, Any], transformer: Any, attentions: int, where: str) -> dict[str, Any]:
    window, causal = _block_rule(raw, transformer, attentions, where)
    return {
        "context": "none" if raw.get("disable_target_kv_reuse", False) else "target",
        "heads": transformer.num_attention_heads,
        "kv_heads": transformer.num_key_value_heads,
        "head_dim": head_dim_of(transformer),
        "qk_norm": raw.get("use_qk_norm", True),
        "window": window,
        "causal_block": causal,
        "rope": _ropes(raw, transformer, attentions, where),
    }


def _pattern(raw: Mapping[str, Any], where: str) -> list[str]:
    value = raw.get("block_pattern")
    tokens = value.split() if isinstance(value, str) else value
    if not isinstance(tokens, list) or not tokens:
        raise HSpecError(f"{where} has no block_pattern: the file is damaged")
    return [str(token).lower() for token in tokens]


def _taps(raw: Mapping[str, Any], kv_layers: list[int], layers: int, where: str) -> list[int]:
    if not kv_layers and raw.get("latent_fusion_layer_ids") is None:
        raise HSpecError(f"{where} has no latent_fusion_layer_ids: the file is damaged")
    key = "latent_fusion_layer_ids"
    taps = ascending_taps(raw, key, where) if raw.get(key) else sorted(set(kv_layers))
    if layers in taps:
        raise UsageError(
            f"{where}: latent_fusion_layer_ids {taps} has the last layer's output ({layers}), which programs take before the "
            f"final norm or after it: not supported"
        )
    return taps


def _block_rule(raw: Mapping[str, Any], transformer: Any, attentions: int, where: str) -> tuple[int | None, bool]:
    """The context window of all attention sub-layers, and whether the block is causal.

    A sub-layer's window is the drafter's own (``layer_types``, ``sliding_window``, or ``per_layer_sliding_window`` in place of
    both); one that has none falls back on the window of the target layer it reads. Windowed sub-layers are causal within the
    block unless ``sliding_window_non_causal``; those without a window are bidirectional.
    """
    types = getattr(transformer, "layer_types", None) or []
    if len(types) != attentions:
        raise HSpecError(f"{where}: {len(types)} layer_types for {attentions} attention sub-layers: the file is damaged")
    each = getattr(transformer, "per_layer_sliding_window", None)
    if each is None:
        each = {i: transformer.sliding_window for i, kind in enumerate(types) if kind == "sliding_attention"}
    windows: dict[int, int | None] = {int(i): window for i, window in each.items()}
    for i, entry in enumerate(raw.get("attn_rope") or []):
        if i not in windows and entry.get("sliding_window") is not None:
            windows[i] = entry["sliding_window"]
    found = {windows.get(i) for i in range(attentions)}
    if len(found) > 1:
        raise UsageError(
            f"{where}: attention sub-layers with different windows ({[windows.get(i) for i in range(attentions)]}) are not "
            f"supported, one for all is: choose another drafter"
        )
    window = found.pop()
    return window, window is not None and not raw.get("sliding_window_non_causal", False)


def _ropes(raw: Mapping[str, Any], transformer: Any, attentions: int, where: str) -> list[dict[str, Any]]:
    entries = raw.get("attn_rope")
    if entries is None:  # written before the layout kept them: the drafter's own, for every sub-layer
        return [dict(transformer.rope_parameters)] * attentions
    if len(entries) != attentions or not all(isinstance(e.get("rope_parameters"), dict) for e in entries):
        raise HSpecError(
            f"{where}: attn_rope must have rope_parameters for each of {attentions} attention sub-layers: the file is damaged"
        )
    return [dict(entry["rope_parameters"]) for entry in entries]


def weight_names(config: ParallelConfig) -> dict[str, str]:
    """The layout's name of every tensor of a drafter -> its name in :class:`ParallelDrafter`; all but the mask row."""
    names = {"norm.weight": "norm.weight"}
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if config.attention is not None and config.attention.qk_norm:
        attention += ["q_norm", "k_norm"]
    for i, kind in enumerate(config.pattern):
        theirs, ours = f"layers.{i}.", f"layers.{i}."
        if kind == "mamba":
            names[theirs + "ssm_norm.weight"] = f"norms.{i}.weight"
            names |= {f"{theirs}ssm.conv1d.{part}": f"{ours}conv_{part}" for part in ("weight", "bias")}
            same = ("in_proj.weight", "A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
            names |= {f"{theirs}ssm.{part}": ours + part for part in same}
        elif kind == "attention":
            names[theirs + "input_layernorm.weight"] = f"norms.{i}.weight"
            names |= {f"{theirs}self_attn.{part}.weight": f"{ours}{part}.weight" for part in attention}
        else:
            names[theirs + "mlp_norm.weight"] = f"norms.{i}.weight"
            names |= {f"{theirs}mlp.{part}.weight": f"{ours}{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")}
    if config.seeds_state:
        names |= {"fc.weight": "seed.fc.weight", "hidden_norm.weight": "seed.norm.weight"}
        projections = config.pattern.count("mamba") if config.seed_mode == "per_layer" else 1
        names |= {f"seed_projs.{j}.weight": f"seed.projections.{j}.weight" for j in range(projections)}
        if config.fusion_norm:
            names |= {f"fc_norm.{f}.weight": f"seed.tap_norms.{f}.weight" for f in range(len(config.taps))}
    if config.head is not None:
        names |= {f"markov_head.markov_w{n}.weight": f"causal.w{n}.weight" for n in (1, 2)}
    if config.confidence_head:
        names |= {f"confidence_head.proj.{part}": f"confidence.proj.{part}" for part in ("weight", "bias")}
    return names


# -- writing -----------------------------------------------------------------------------------------------------


def refusals(config: ParallelConfig) -> list[str]:
    """What of a drafter the layout cannot say."""
    head, attention = config.head, config.attention
    wrong = []
    if head is not None and not (isinstance(head, MarkovConfig) and head.variant == "vanilla"):
        wrong.append(f"its causal head ({getattr(head, 'variant', head.kind)}; a vanilla Markov head it knows)")
    if config.convolution is not None:
        wrong.append("its convolution")
    if config.sample_from_anchor:
        wrong.append("a slot 0 that drafts (sample_from_anchor)")
    if config.seeds_state and config.fusion_rank != config.hidden_size:
        wrong.append(f"its fusion_rank {config.fusion_rank} (it has the hidden size, {config.hidden_size})")
    if config.target.layers in config.taps:
        wrong.append(f"its tap {config.target.layers}, the target's last output")
    if attention is None:
        return wrong
    windows = {attention.window_of(i) for i in range(len(config.kv_layers))}
    causal = {attention.causal_of(i) for i in range(len(config.kv_layers))}
    if attention.context == "features":
        wrong.append("K/V of its own of every context token (attention.context: features)")
    if len(windows) > 1 or len(causal) > 1:
        wrong.append("attention sub-layers with different windows or block rules")
    elif windows == {None} and causal == {True}:
        wrong.append("causal blocks without a window (without one they are bidirectional there)")
    return wrong


def authors_fields(config: ParallelConfig, target: Target) -> dict[str, Any]:
    """The type's own keys of a configuration without :func:`refusals`; :func:`authors_config` reads them back."""
    mamba, count = config.mamba or MambaConfig(heads=64, state_dim=16, groups=1), len(config.kv_layers)
    attention = config.attention or AttentionConfig(heads=1, kv_heads=1, head_dim=64, window=None, causal_block=False, rope=[])
    windows = [attention.window_of(i) for i in range(count)]
    return {
        "transformer_layer_config": transformer_fields(config, config.intermediate_size, attention, windows, target),
        "block_pattern": list(config.pattern),
        "block_size": config.block_size,
        "attn_kv_layer_ids": list(config.kv_layers),
        "aux_hidden_state_layer_ids": sorted(set(config.kv_layers)),
        "latent_fusion_layer_ids": list(config.taps),
        # The drafter's own windows say it all; those of the target's layers would only stand in for missing ones.
        "attn_rope": [
            {"rope_parameters": dict(rope), "sliding_window": None, "layer_type": "full_attention"} for rope in attention.rope
        ],
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_dim,
        "mamba_d_state": mamba.state_dim,
        "mamba_n_groups": mamba.groups,
        "mamba_conv_kernel": mamba.conv_kernel,
        "mamba_seed_mode": config.seed_mode,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
        "use_qk_norm": attention.qk_norm,
        "fc_norm": config.fusion_norm,
        "sliding_window_non_causal": bool(count) and windows[0] is not None and not attention.causal_of(0),
        "disable_mamba_init_state_injection": not config.use_state,
        "disable_target_kv_reuse": attention.context == "none",
    }
