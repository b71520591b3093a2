"""H-Spec checkpoints as its authors publish them: ``speculators`` layout, type ``mamba_attn_hybrid``.

A folder with ``config.json`` and ``model.safetensors`` (or shards with an index). What the layout says and this project cannot
honour is refused by name; nothing is dropped in silence. See docs/checkpoints.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from hspec.drafters.config import ParallelConfig
from hspec.errors import HSpecError, UsageError

MODEL_TYPE = "mamba_attn_hybrid"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_READ = {
    "speculators_model_type", "transformer_layer_config", "block_pattern", "block_size", "attn_kv_layer_ids",
    "latent_fusion_layer_ids", "attn_rope", "mamba_num_heads", "mamba_head_dim", "mamba_d_state", "mamba_n_groups",
    "mamba_conv_kernel", "mamba_seed_mode", "draft_vocab_size", "mask_token_id", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", "use_qk_norm", "fc_norm", "sliding_window_non_causal",
    "disable_mamba_init_state_injection", "disable_target_kv_reuse",
}  # fmt: skip
_WITHOUT_EFFECT = {
    # how it was trained, and what can be derived from the rest
    "max_anchors", "trainable_q_proj", "trainable_kv_proj", "trainable_q_norm", "trainable_k_norm", "init_q_proj",
    "init_kv_proj", "init_q_norm", "init_k_norm", "agg_mode", "mamba_expand", "aux_hidden_state_layer_ids",
    "verifier_layer_prefix", "speculators_config",
    # who wrote it
    "speculators_version", "transformers_version", "auto_map", "architectures", "model_type", "dtype", "torch_dtype",
    "tie_word_embeddings",
}  # fmt: skip
_OWN_WEIGHTS = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_UNUSED_WEIGHTS = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class AuthorsCheckpoint:
    """A checkpoint in this project's terms; tensors in the types of the file."""

    config: ParallelConfig
    weights: dict[str, Tensor]
    """For :meth:`ParallelDrafter.load_state_dict`, the ``mask_embedding`` among them if the file has an embedding."""
    embedding: Tensor | None
    """``[vocabulary, hidden]``; None if the file has none (then the target's is meant)."""
    head: Tensor
    """LM-head rows of the draft vocabulary, ``[draft vocabulary, hidden]``."""
    draft_ids: Tensor
    """Target id of each draft id, ascending, ``[draft vocabulary]`` int64."""
    mask_token_id: int


def is_authors(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed ``config.json`` is in the layout of ``speculators`` (of whatever type)."""
    return "speculators_model_type" in raw


def read_authors(folder: Path, layers: int, family: str | None = None) -> AuthorsCheckpoint:
    """Read a checkpoint folder.

    Args:
        layers: how many decoder layers the target has; the layout does not say.
        family: the target's model type; by default what the layout's verifier says.

    Raises:
        UsageError: no such folder, another drafter's, or one that needs what is not supported.
        HSpecError: files are damaged or do not fit each other.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UsageError(f"no drafter at {folder}: give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    raw = _read_json(path)
    config = authors_config(raw, layers, family, where=str(path))
    return convert_weights(_read_tensors(folder), config, raw.get("mask_token_id"), where=str(folder))


# -- the configuration -------------------------------------------------------------------------------------------


def authors_config(raw: Mapping[str, Any], layers: int, family: str | None = None, where: str = CONFIG_FILE) -> ParallelConfig:
    """A parsed ``config.json`` of the layout as this project's configuration.

    Args:
        layers, family: see :func:`read_authors`.
        where: named in errors.

    Raises:
        UsageError: another type of drafter, or a setting that is not supported.
        HSpecError: the configuration contradicts itself.
    """
    kind = raw.get("speculators_model_type")
    if kind != MODEL_TYPE:
        raise UsageError(f"{where}: a drafter of the type {kind!r}; of this layout only {MODEL_TYPE!r} can be read")
    _refuse_unknown(raw, where)
    transformer = _transformer_config(raw, where)
    pattern = _pattern(raw, where)
    kv_layers = _layer_ids(raw, "attn_kv_layer_ids", where)
    attentions = pattern.count("attention")
    if not len(kv_layers) == attentions == transformer.num_hidden_layers:
        raise HSpecError(
            f"{where}: block_pattern has {attentions} attention sub-layers, attn_kv_layer_ids {len(kv_layers)} entries and "
            f"transformer_layer_config {transformer.num_hidden_layers} layers; they must be as many: the file is damaged"
        )
    window, causal = _block_rule(raw, transformer, attentions, where)
    markov_rank = raw.get("markov_rank", 0)
    if markov_rank and raw.get("markov_head_type", "vanilla") != "vanilla":
        raise UsageError(
            f"{where}: markov_head_type {raw['markov_head_type']!r} is not supported, only 'vanilla' is: choose another drafter"
        )
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    heads = transformer.num_attention_heads
    fields = {
        "target": {
            "name": verifier.get("name_or_path") or "an unnamed target",
            "family": family or _family(verifier),
            "layers": layers,
            "hidden_size": transformer.hidden_size,
            "vocab_size": transformer.vocab_size,
        },
        "pattern": pattern,
        "hidden_size": transformer.hidden_size,
        "intermediate_size": transformer.intermediate_size,
        "rms_norm_eps": transformer.rms_norm_eps,
        "block_size": raw.get("block_size", 8),
        "mamba": {
            "heads": raw.get("mamba_num_heads", 64),
            "head_dim": raw.get("mamba_head_dim", 64),
            "state_dim": raw.get("mamba_d_state", 16),
            "groups": raw.get("mamba_n_groups", 1),
            "conv_kernel": raw.get("mamba_conv_kernel", 4),
        },
        "attention": {
            "context": "none" if raw.get("disable_target_kv_reuse", False) else "target",
            "heads": heads,
            "kv_heads": transformer.num_key_value_heads,
            "head_dim": getattr(transformer, "head_dim", None) or transformer.hidden_size // heads,
            "qk_norm": raw.get("use_qk_norm", True),
            "window": window,
            "causal_block": causal,
            "rope": _ropes(raw, transformer, attentions, where),
        },
        "taps": _taps(raw, kv_layers, layers, where),
        "kv_layers": kv_layers,
        "fusion_rank": transformer.hidden_size,
        "fusion_norm": raw.get("fc_norm", False),
        "seed_mode": raw.get("mamba_seed_mode", "per_layer"),
        "draft_vocab_size": raw.get("draft_vocab_size", 32000),
        "head": {"kind": "markov", "rank": markov_rank} if markov_rank else None,
        "confidence_head": raw.get("enable_confidence_head", False),
        "confidence_with_markov": raw.get("confidence_head_with_markov", False),
        "use_state": not raw.get("disable_mamba_init_state_injection", False),
    }
    try:
        return ParallelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{where}: {place + ': ' if place else ''}{first['msg']}: this drafter cannot be used here") from error


def _refuse_unknown(raw: Mapping[str, Any], where: str) -> None:
    """A key that this version does not know may change what the drafter computes; only one that is off is harmless."""
    generic = PreTrainedConfig().to_dict().keys()
    for key, value in raw.items():
        known = key in _READ or key in _WITHOUT_EFFECT or key in generic or key.startswith("_")
        if not known and value not in (None, False, 0, "", [], {}):
            raise UsageError(
                f"{where}: {key} = {value!r} is not supported; a drafter that needs it would draft wrongly here: "
                f"choose another drafter, or a newer version of hspec"
            )


def _transformer_config(raw: Mapping[str, Any], where: str) -> Any:
    """The nested configuration with transformers' defaults: the layout may store only what differs from them."""
    nested = dict(raw.get("transformer_layer_config") or {})
    if not nested:
        raise HSpecError(f"{where} has no transformer_layer_config: the file is damaged")
    kind = nested.pop("model_type", "qwen3")
    try:
        config = AutoConfig.for_model(kind, **nested)
    except Exception as error:  # transformers checks fields with errors of many types
        raise HSpecError(f"{where}: transformer_layer_config (model_type {kind!r}) cannot be read: {error}") from error
    for key, wanted in (("hidden_act", "silu"), ("attention_bias", False)):
        if getattr(config, key, wanted) != wanted:
            raise UsageError(
                f"{where}: transformer_layer_config.{key} = {getattr(config, key)!r} is not supported, only {wanted!r} is: "
                f"choose another drafter"
            )
    return config


def _pattern(raw: Mapping[str, Any], where: str) -> list[str]:
    value = raw.get("block_pattern")
    tokens = value.split() if isinstance(value, str) else value
    if not isinstance(tokens, list) or not tokens:
        raise HSpecError(f"{where} has no block_pattern: the file is damaged")
    return [str(token).lower() for token in tokens]


def _layer_ids(raw: Mapping[str, Any], key: str, where: str) -> list[int]:
    value = raw.get(key)
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise HSpecError(f"{where}: {key} must be a list of layer numbers, not {value!r}: the file is damaged")
    return list(value)


def _taps(raw: Mapping[str, Any], kv_layers: list[int], layers: int, where: str) -> list[int]:
    """Hidden state i of the layout is the input of decoder layer i, which is tap i here."""
    if not kv_layers and raw.get("latent_fusion_layer_ids") is None:
        raise HSpecError(f"{where} has no latent_fusion_layer_ids: the file is damaged")
    taps = _layer_ids(raw, "latent_fusion_layer_ids", where) if raw.get("latent_fusion_layer_ids") else sorted(set(kv_layers))
    if taps != sorted(set(taps)):
        raise UsageError(
            f"{where}: latent_fusion_layer_ids {taps} do not ascend, so that it is not certain which of them a column of fc "
            f"belongs to (the layout's servers sort them, its configuration does not): not supported"
        )
    if layers in taps:
        raise UsageError(
            f"{where}: latent_fusion_layer_ids {taps} has the last layer's output ({layers}), which programs take before the "
            f"final norm or after it: not supported"
        )
    return taps


def _block_rule(raw: Mapping[str, Any], transformer: Any, attentions: int, where: str) -> tuple[int | None, bool]:
    """The context window and whether the block is causal.

    A sub-layer's window is the drafter's own (``layer_types``, ``sliding_window``, or ``per_layer_sliding_window`` in place of
    both); one that has none falls back on the window of the target layer it reads. Windowed sub-layers are causal within the
    block unless ``sliding_window_non_causal``; those without a window are bidirectional.
    """
    if attentions == 0:
        return None, False
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


def _family(verifier: Mapping[str, Any]) -> str:
    """``Qwen3ForCausalLM`` -> ``qwen3``; informative only."""
    names = verifier.get("architectures") or ["unknown"]
    return str(names[0]).removesuffix("ForCausalLM").lower()


# -- the weights -------------------------------------------------------------------------------------------------


def convert_weights(
    tensors: Mapping[str, Tensor], config: ParallelConfig, mask_token_id: int | None, where: str = WEIGHTS_FILE
) -> AuthorsCheckpoint:
    """Tensors under the layout's names -> those of :class:`ParallelDrafter` and what stands beside them.

    Raises:
        HSpecError: a tensor is missing, surplus or inconsistent.
    """
    names = weight_names(config)
    missing = sorted({*names, "lm_head.weight"} - tensors.keys())
    surplus = sorted(tensors.keys() - names.keys() - {*_OWN_WEIGHTS, *_UNUSED_WEIGHTS})
    if missing or surplus:
        raise HSpecError(f"{where} does not fit its {CONFIG_FILE}: missing {missing[:3]}, not expected {surplus[:3]}")
    weights = {ours: tensors[theirs] for theirs, ours in names.items()}
    for ours, weight in weights.items():
        if ours.endswith(".conv_weight"):  # [channels, 1, kernel]
            weights[ours] = weight.flatten(1)
    embedding = tensors.get("embed_tokens.weight")
    if mask_token_id is None or not 0 <= mask_token_id < config.target.vocab_size:
        raise HSpecError(f"{where}: mask_token_id {mask_token_id} is not a token of the vocabulary: the file is damaged")
    if embedding is not None:
        _check_shape(embedding, (config.target.vocab_size, config.hidden_size), "embed_tokens.weight", where)
        weights["mask_embedding"] = embedding[mask_token_id]  # its own row: the authors replace one that is all zeros
    head = tensors["lm_head.weight"]
    _check_shape(head, (config.draft_vocab_size, config.hidden_size), "lm_head.weight", where)
    return AuthorsCheckpoint(config, weights, embedding, head, _draft_ids(tensors, config, where), mask_token_id)


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
    mambas = config.pattern.count("mamba")
    if config.use_state and mambas:
        names |= {"fc.weight": "seed.fc.weight", "hidden_norm.weight": "seed.norm.weight"}
        projections = mambas if config.seed_mode == "per_layer" else 1
        names |= {f"seed_projs.{j}.weight": f"seed.projections.{j}.weight" for j in range(projections)}
        if config.fusion_norm:
            names |= {f"fc_norm.{f}.weight": f"seed.tap_norms.{f}.weight" for f in range(len(config.taps))}
    if config.head is not None:
        names |= {f"markov_head.markov_w{n}.weight": f"causal.w{n}.weight" for n in (1, 2)}
    if config.confidence_head:
        names |= {f"confidence_head.proj.{part}": f"confidence.proj.{part}" for part in ("weight", "bias")}
    return names


def _draft_ids(tensors: Mapping[str, Tensor], config: ParallelConfig, where: str) -> Tensor:
    """``d2t`` holds target id - draft id; absent where the draft vocabulary is the target's."""
    size, vocabulary = config.draft_vocab_size, config.target.vocab_size
    offsets = tensors.get("d2t")
    if offsets is None:
        if size != vocabulary:
            raise HSpecError(f"{where} has no d2t for its draft vocabulary of {size} in {vocabulary}: the file is incomplete")
        return torch.arange(size)
    _check_shape(offsets, (size,), "d2t", where)
    ids = torch.arange(size) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or not bool((ids.diff() > 0).all()):
        raise HSpecError(f"{where}: d2t does not give ascending ids below {vocabulary}: the file is damaged")
    mask = tensors.get("t2d")
    if mask is not None and not torch.equal(mask.nonzero().flatten(), ids):
        raise HSpecError(f"{where}: t2d and d2t name different draft vocabularies: the file is damaged")
    return ids


def _check_shape(tensor: Tensor, shape: tuple[int, ...], name: str, where: str) -> None:
    if tensor.shape != shape:
        raise HSpecError(f"{where}: {name} is {list(tensor.shape)}, its {CONFIG_FILE} asks for {list(shape)}")


# -- files -------------------------------------------------------------------------------------------------------


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX_FILE
    if index.is_file():
        listed = _read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise HSpecError(f"{index} has no weight_map: it is damaged, fetch the drafter again")
        files = [folder / name for name in sorted(set(listed.values()))]
    else:
        files = [folder / WEIGHTS_FILE]
    tensors: dict[str, Tensor] = {}
    for path in files:
        if path.parent != folder:  # an index names files of its own folder, nothing outside it
            raise HSpecError(f"{index} names {path}, which is outside of the drafter's folder")
        try:
            tensors |= load_file(path)
        except FileNotFoundError as error:
            raise HSpecError(f"{folder} has no {path.name}: the checkpoint is incomplete, fetch it again") from error
        except (SafetensorError, OSError) as error:
            raise HSpecError(f"{path} is damaged or cut short ({error}): fetch the drafter again") from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HSpecError(f"{path} is damaged ({error}): fetch the drafter again") from error
    if not isinstance(raw, dict):
        raise HSpecError(f"{path} is damaged (not a JSON object): fetch the drafter again")
    return raw
