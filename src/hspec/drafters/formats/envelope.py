"""What all drafters in the layout of ``speculators`` share: the keys around a type's own, the draft vocabulary, the fit of
tensors and configuration. docs/speculators-format.md has the layout; what it says and this project cannot honour is refused
by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from hspec.drafters.config import AttentionConfig, DrafterConfig
from hspec.drafters.drafter import Drafter
from hspec.drafters.family import meta_drafter
from hspec.drafters.formats.files import CONFIG_FILE
from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target

Schema = TypeVar("Schema", bound=DrafterConfig)

VERSION = "0.9.0"
"""Of the library whose layout is read and written."""

READ = {"speculators_model_type", "transformer_layer_config", "draft_vocab_size"}
"""Keys that every type is read from."""
WITHOUT_EFFECT = {
    "speculators_config", "speculators_version", "transformers_version", "auto_map", "architectures", "model_type", "dtype",
    "torch_dtype", "tie_word_embeddings", "target_hidden_size",
}  # fmt: skip
VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
"""Tensors that are the target's or name its tokens; which of them a checkpoint needs depends on its type."""
UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")
"""The target's, for training only."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in this project's terms; tensors in the types of the file."""

    config: DrafterConfig
    weights: dict[str, Tensor]
    """For the drafter's ``load_state_dict``; a ``mask_embedding`` among them if it comes with the file's embedding."""
    embedding: Tensor | None
    """``[vocabulary, hidden]``; None if the file has none (then the target's is meant)."""
    head: Tensor | None
    """LM-head rows of the draft vocabulary, ``[draft vocabulary, hidden]``; None if they are the target's."""
    draft_ids: Tensor
    """Target id of each draft id, ascending, ``[draft vocabulary]`` int64."""
    mask_token_id: int | None
    own_vocabulary: bool
    """Whether the type comes with its own embedding and head; otherwise the target's are meant, stored or not."""


# -- reading the configuration -----------------------------------------------------------------------------------


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed ``config.json`` is in the layout of ``speculators`` (of whatever type)."""
    return "speculators_model_type" in raw


def refuse_unknown(raw: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """A key that this version does not know may change what the drafter computes; only one that is off is harmless.

    Raises:
        UsageError: some are on; all of them are named.
    """
    harmless = {*known, *READ, *WITHOUT_EFFECT, *PreTrainedConfig().to_dict()}
    on = {
        key: value
        for key, value in raw.items()
        if key not in harmless and not key.startswith("_") and value not in (None, False, 0, "", [], {})
    }
    if on:
        listed = ", ".join(f"{key} = {value!r}" for key, value in on.items())
        raise UsageError(
            f"{where}: {listed} is not supported; a drafter that needs it would draft wrongly here: choose another drafter, "
            f"or a newer version of hspec"
        )


def transformer_config(raw: Mapping[str, Any], where: str) -> Any:
    """The nested configuration with transformers' defaults: the layout may store only what differs from them.

    Raises:
        UsageError: it asks for what is not supported.
        HSpecError: it is missing or makes no sense.
    """
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


def layer_ids(raw: Mapping[str, Any], key: str, where: str) -> list[int]:
    """Raises:
    HSpecError: not a list of numbers.
    """
    value = raw.get(key)
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise HSpecError(f"{where}: {key} must be a list of layer numbers, not {value!r}: the file is damaged")
    return list(value)


def ascending_taps(raw: Mapping[str, Any], key: str, where: str) -> list[int]:
    """Hidden state i of the layout is the input of decoder layer i, which is tap i here.

    Raises:
        UsageError: they do not ascend.
    """
    taps = layer_ids(raw, key, where)
    if taps != sorted(set(taps)):
        raise UsageError(
            f"{where}: {key} {taps} do not ascend, so that it is not certain which of them a column of fc belongs to (servers "
            f"sort them, the configuration does not): not supported"
        )
    return taps


def layer_windows(transformer: Any, where: str) -> list[int | None]:
    """The window of each layer; None sees everything, as one that says it slides but has no window.

    Raises:
        HSpecError: not as many kinds as layers.
    """
    count = transformer.num_hidden_layers
    kinds = getattr(transformer, "layer_types", None) or ["full_attention"] * count
    if len(kinds) != count:
        raise HSpecError(f"{where}: {len(kinds)} layer_types for {count} layers: the file is damaged")
    window = getattr(transformer, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def one_or_all(values: list[Any]) -> Any:
    """A list of equal values as that value."""
    return values[0] if len(set(values)) == 1 else values


def shared_rope(transformer: Any, where: str) -> dict[str, Any]:
    """The library has one table for all layers, the sliding ones' if there are several, and in the default kind of RoPE
    rotates all of a head.

    Raises:
        UsageError: a partial rotation of another kind.
    """
    rope = dict(transformer.rope_parameters)
    rope = dict(rope.get("sliding_attention", rope))
    part = rope.pop("partial_rotary_factor", None)
    if part not in (None, 1.0) and rope.get("rope_type", "default") != "default":
        raise UsageError(
            f"{where}: transformer_layer_config.rope_parameters.partial_rotary_factor = {part} of rope_type "
            f"{rope['rope_type']!r} is not supported: choose another drafter"
        )
    return rope


def common_fields(raw: Mapping[str, Any], transformer: Any, layers: int, family: str | None) -> dict[str, Any]:
    """What the schemas of all drafters have and the layout says alike for all types."""
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    names = verifier.get("architectures") or ["unknown"]
    return {
        "target": {
            "name": verifier.get("name_or_path") or "an unnamed target",
            "family": family or str(names[0]).removesuffix("ForCausalLM").lower(),
            "layers": layers,
            "hidden_size": transformer.hidden_size,
            "vocab_size": transformer.vocab_size,
        },
        "hidden_size": transformer.hidden_size,
        "intermediate_size": transformer.intermediate_size,
        "rms_norm_eps": transformer.rms_norm_eps,
        "draft_vocab_size": raw.get("draft_vocab_size", 32000),
    }


def validated(schema: type[Schema], fields: dict[str, Any], where: str) -> Schema:
    """Raises:
    UsageError: the fields do not fit the schema, or each other.
    """
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, e['loc']))}{': ' if e['loc'] else ''}{e['msg']}" for e in error.errors()]
        raise UsageError(f"{where}: {'; '.join(found)}: this drafter cannot be used here") from error


# -- reading the weights -----------------------------------------------------------------------------------------


def fitting(
    tensors: Mapping[str, Tensor], config: DrafterConfig, names: Mapping[str, str], needed: Collection[str], where: str
) -> dict[str, Tensor]:
    """The tensors of a drafter's own under their names here, in its shapes, once all of a file's are what they must be.

    Args:
        names: the layout's name of every tensor of the drafter -> its name here.
        needed: of :data:`VOCABULARY`, those that must be there too.

    Raises:
        HSpecError: tensors are missing, surplus or of another shape; all of them are named.
    """
    state = meta_drafter(config).state_dict()
    shapes = {theirs: list(to_layout(theirs, state[ours]).shape) for theirs, ours in names.items()}
    size, vocabulary, hidden = config.draft_vocab_size, config.target.vocab_size, config.hidden_size
    own = dict(zip(VOCABULARY, ([vocabulary, hidden], [size, hidden], [size], [vocabulary]), strict=True))
    wrong = [f"{name} is missing" for name in sorted({*shapes, *needed} - tensors.keys())]
    wrong += [f"{name} is not expected" for name in sorted(tensors.keys() - shapes.keys() - own.keys() - {*UNUSED})]
    for name, shape in (shapes | own).items():
        if name in tensors and list(tensors[name].shape) != shape:
            wrong.append(f"{name} is {list(tensors[name].shape)}, its {CONFIG_FILE} asks for {shape}")
    if wrong:
        raise HSpecError(f"{where} does not fit its {CONFIG_FILE}: {'; '.join(wrong)}: the file is damaged, fetch it again")
    return {ours: tensors[theirs].reshape(state[ours].shape) for theirs, ours in names.items()}


def to_layout(name: str, weight: Tensor) -> Tensor:
    """Ours in the shape of the layout's tensor ``name``."""
    if name.endswith("conv1d.weight"):  # [channels, 1, kernel]
        return weight[:, None]
    return weight.reshape(1, 1, -1) if name == "mask_hidden" else weight  # [1, 1, taps * hidden]


def read_draft_ids(tensors: Mapping[str, Tensor], config: DrafterConfig, where: str) -> Tensor:
    """``d2t`` holds target id - draft id; absent where the draft vocabulary is the target's.

    Raises:
        HSpecError: no ids, or not such as can be.
    """
    size, vocabulary = config.draft_vocab_size, config.target.vocab_size
    offsets = tensors.get("d2t")
    if offsets is None:
        if size != vocabulary:
            raise HSpecError(f"{where} has no d2t for its draft vocabulary of {size} in {vocabulary}: the file is incomplete")
        return torch.arange(size)
    ids = torch.arange(size) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or not bool((ids.diff() > 0).all()):
        raise HSpecError(f"{where}: d2t does not give ascending ids below {vocabulary}: the file is damaged")
    mask = tensors.get("t2d")
    if mask is not None and not torch.equal(mask.nonzero().flatten(), ids):
        raise HSpecError(f"{where}: t2d and d2t name different draft vocabularies: the file is damaged")
    return ids


def check_token(token: Any, config: DrafterConfig, where: str) -> int:
    """Raises:
    HSpecError: not a token of the vocabulary.
    """
    if type(token) is not int or not 0 <= token < config.target.vocab_size:
        raise HSpecError(f"{where}: mask_token_id {token} is not a token of the vocabulary: the file is damaged")
    return token


# -- writing -----------------------------------------------------------------------------------------------------


def refuse(config: DrafterConfig, layout: str, reasons: list[str]) -> None:
    """Raises:
    UsageError: there are reasons why a drafter cannot be written in a layout; all of them are named.
    """
    if reasons:
        raise UsageError(
            f"this {config.method} drafter cannot be written as {layout}, which has no place for: {'; '.join(reasons)}. Keep it "
            f"in the layout that it has"
        )


def rope_refusals(attention: AttentionConfig) -> list[str]:
    """What of the layers' RoPE has no place in one table that rotates all of a head."""
    wrong = []
    if any(rope != attention.rope[0] for rope in attention.rope):
        wrong.append("layers with different RoPE parameters (attention.rope)")
    if any(rope.get("partial_rotary_factor") not in (None, 1.0) for rope in attention.rope):
        wrong.append("a partial rotation (attention.rope.partial_rotary_factor)")
    return wrong


def envelope_fields(kind: str, architecture: str, config: DrafterConfig, target: Target) -> dict[str, Any]:
    """The keys around a type's own."""
    return {
        "speculators_model_type": kind,
        "architectures": [architecture],
        "speculators_version": VERSION,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.max_draft,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": config.target.name, "architectures": [type(target.model).__name__]},
        },
    }


def transformer_fields(
    config: DrafterConfig,
    intermediate_size: int,
    attention: AttentionConfig,
    windows: list[int | None],
    target: Target,
    model_type: str = "qwen3",
) -> dict[str, Any]:
    """The nested configuration, no key that matters left to defaults.

    Args:
        windows: of each attention; those that are not None are one and the same.
        model_type: whose layers the drafter's are.
    """
    window = next((w for w in windows if w is not None), None)
    return {
        "model_type": model_type,
        "vocab_size": config.target.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": len(windows),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(attention.rope[0]) if attention.rope else {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "sliding_window": window,
        "use_sliding_window": window is not None,  # without it a Qwen3 configuration forgets the window
        "max_window_layers": 0,
        "max_position_embeddings": target.max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def vocabulary_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` of a drafter that does not draft all of the target's tokens."""
    ids, vocabulary = drafter.draft_ids.cpu(), drafter.config.target.vocab_size
    if len(ids) == vocabulary:
        return {}
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def named_weights(drafter: Drafter, names: Mapping[str, str]) -> dict[str, Tensor]:
    """A drafter's own weights under the layout's names and in its shapes."""
    state = drafter.state_dict()
    return {theirs: to_layout(theirs, state[ours]) for theirs, ours in names.items()}


def same_rows(a: Tensor, b: Tensor, except_row: int | None = None) -> bool:
    """Whether two matrices of one shape agree, up to the rounding of a half type, in 64 rows evenly spread."""
    rows = torch.arange(0, a.shape[0], max(1, a.shape[0] // 64))
    rows = rows[rows != except_row]
    one, two = a[rows.to(a.device)].float().cpu(), b[rows.to(b.device)].float().cpu()
    return torch.allclose(one, two, rtol=1e-2, atol=1e-2 * float(two.std()))
