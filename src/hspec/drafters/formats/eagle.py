"""EAGLE-3 and P-EAGLE in the layout of ``speculators``: the types ``eagle3`` and ``peagle``.

Their windows count the row itself, ours the rows before it: W there is W - 1 here. See docs/speculators-format.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from hspec.drafters.config import EagleConfig
from hspec.drafters.formats.envelope import (
    ascending_taps,
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
from hspec.errors import UsageError
from hspec.targets.cache import head_dim_of
from hspec.targets.target import Target

ARCHITECTURES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}
TAPS = "eagle_aux_hidden_state_layer_ids"
DRAFTS = 5
"""Tokens a step where the layout names no number."""

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_READ = {TAPS, *_FLAGS}
_WITHOUT_EFFECT = {"embed_requires_grad"}


# -- reading -----------------------------------------------------------------------------------------------------


def eagle_config(raw: Mapping[str, Any], layers: int, family: str | None, where: str) -> EagleConfig:
    """A parsed ``config.json`` as this project's configuration; see :func:`hspec.drafters.formats.authors.authors_config`."""
    kind = raw["speculators_model_type"]
    refuse_unknown(raw, _READ | _WITHOUT_EFFECT | ({"mask_token_id"} if kind == "peagle" else set()), where)
    transformer = transformer_config(raw, where)
    if getattr(transformer, "mlp_bias", False):
        raise UsageError(f"{where}: transformer_layer_config.mlp_bias = True is not supported: choose another drafter")
    count = transformer.num_hidden_layers
    taps = [2, layers // 2, layers - 3] if raw.get(TAPS) is None else ascending_taps(raw, TAPS, where)
    fields = common_fields(raw, transformer, layers, family) | {name: raw.get(name, False) for name in _FLAGS}
    fields |= {
        "method": kind,
        "layers": count,
        "block_size": _drafts(raw),
        "attention": {
            "context": "features",
            "heads": transformer.num_attention_heads,
            "kv_heads": transformer.num_key_value_heads,
            "head_dim": head_dim_of(transformer),
            "qk_norm": transformer.model_type == "qwen3",
            "window": _windows(transformer, kind, where),
            "causal_block": True,
            "rope": [shared_rope(transformer, where)] * count,
        },
        "taps": taps,
        "kv_layers": [min(max(taps, default=0), layers - 1)] * count,  # where training began; the layout does not say
    }
    return validated(EagleConfig, fields, where)


def _drafts(raw: Mapping[str, Any]) -> int:
    """The layers draft any number of tokens; how many is said for servers only."""
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return proposals[0].get("speculative_tokens") or DRAFTS


def _windows(transformer: Any, kind: str, where: str) -> Any:
    windows = layer_windows(transformer, where)
    if 1 in windows:
        raise UsageError(
            f"{where}: transformer_layer_config.sliding_window = 1 is not supported, a row would see itself alone: choose "
            f"another drafter"
        )
    if kind == "peagle" and any(w is not None for w in windows):
        warnings.warn(
            f"{where}: the window of {max(w or 0 for w in windows)} moves with the slot there and stands still here: behind "
            f"longer contexts the text stays exact, but fewer drafts may be accepted",
            stacklevel=2,
        )
    return one_or_all([None if w is None else w - 1 for w in windows])


def weight_names(config: EagleConfig) -> dict[str, str]:
    """The layout's name of every tensor of a drafter -> its name in :class:`EagleDrafter`; all but the mask row."""
    names = {"fc.weight": "fc.weight", "norm.weight": "norm.weight"}
    attention = ["q_proj", "k_proj", "v_proj", "o_proj", *(["q_norm", "k_norm"] if config.attention.qk_norm else [])]
    for n in range(config.layers):
        layer = f"layers.{n}."
        if n == 0:
            names |= {layer + "input_layernorm.weight": layer + "embed_norm.weight"}
            names |= {layer + "hidden_norm.weight": layer + "norm.weight"}
        else:
            names |= {layer + "input_layernorm.weight": layer + "norm.weight"}
        names |= {layer + "post_attention_layernorm.weight": layer + "mlp_norm.weight"}
        names |= {f"{layer}self_attn.{part}.weight": f"{layer}attention.{part}.weight" for part in attention}
        names |= {f"{layer}mlp.{part}.weight": f"{layer}mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")}
    if config.norm_before_fc:
        names["input_norm.weight"] = "fusion_norm.weight"
    if config.fc_norm:
        names |= {f"fc_norm.{f}.weight": f"tap_norms.{f}.weight" for f in range(len(config.taps))}
    return names | ({"mask_hidden": "mask_hidden"} if config.method == "peagle" else {})


# -- writing -----------------------------------------------------------------------------------------------------


def refusals(config: EagleConfig) -> list[str]:
    """What of a drafter the layout cannot say."""
    attention = config.attention
    windows = {attention.window_of(i) for i in range(config.layers)} - {None}
    wrong = rope_refusals(attention)
    if len(windows) > 1:
        wrong.append("layers with different windows")
    if not all(attention.causal_of(i) for i in range(config.layers)):
        wrong.append("slots that see later ones (attention.causal_block)")
    return wrong


def eagle_fields(config: EagleConfig, target: Target) -> dict[str, Any]:
    """The type's own keys of a configuration without :func:`refusals`; :func:`eagle_config` reads them back."""
    attention = config.attention
    own = [attention.window_of(i) for i in range(config.layers)]
    windows = [None if w is None else w + 1 for w in own]
    return {
        "transformer_layer_config": transformer_fields(
            config, config.intermediate_size, attention, windows, target, "qwen3" if attention.qk_norm else "llama"
        ),
        TAPS: list(config.taps),
        **{name: getattr(config, name) for name in _FLAGS},
    }
