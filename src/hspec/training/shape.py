"""What a drafter for a target looks like: a preset by name, one made from the target's own sizes, or a file of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hspec.drafters.config import DrafterConfig, ParallelConfig, SubLayer, TargetIdentity
from hspec.drafters.methods import TargetLayers, configuration
from hspec.drafters.presets import COMPACT_PATTERN, PRESETS
from hspec.errors import UsageError
from hspec.files import reason
from hspec.targets.cache import head_dim_of

AUTO = "auto"
WINDOW = 2048
_FILES = (".yaml", ".yml", ".json")


def choose_shape(
    preset: str, name: str, target: Any, method: str = "hspec", changes: dict[str, Any] | None = None, matched: bool = False
) -> DrafterConfig:
    """The configuration that ``--preset`` and ``--method`` ask for, fitted to a target.

    Args:
        preset: ``auto``, the name of a preset, or a YAML or JSON file with keys of :class:`ParallelConfig`; what the file
            leaves out is as in ``auto``. It is of H-Spec; the configurations of the other methods follow from it.
        name: the target's name. target: its transformers configuration.
        changes: such keys, that change what ``auto`` gives. matched: with as many parameters as H-Spec.

    Raises:
        UsageError: no such preset or method, a preset for another target, or a file with wrong keys.
    """
    base = preset_for(target, name, changes, "drafter") if changes else _base(preset, name, target)
    return base if method == "hspec" else configuration(method, base, target_layers(target), matched)


def target_layers(target: Any) -> TargetLayers:
    """What methods ask of the layers of a target, given its transformers configuration."""
    full = [layer for layer in range(target.num_hidden_layers) if not _slides(target, layer)]
    return TargetLayers(
        rope=lambda layer: layer_rope(target, layer),
        readable=lambda near: min(full, key=lambda layer: abs(layer - near)) if full else near,
    )


def _base(preset: str, name: str, target: Any) -> ParallelConfig:
    if preset == AUTO:
        fitting = next((p for p in PRESETS.values() if _misfit(p, target) is None), None)
        return preset_for(target, name) if fitting is None else _fitted(fitting, target, name)
    if preset in PRESETS:
        wrong = _misfit(PRESETS[preset], target)
        if wrong is not None:
            raise UsageError(
                f"preset {preset} is for {PRESETS[preset].target.name}, not for {name} ({wrong}): leave --preset out, and one is "
                f"made for this target"
            )
        return _fitted(PRESETS[preset], target, name)
    path = Path(preset).expanduser()
    if path.suffix not in _FILES and not path.exists():
        raise UsageError(f"no preset {preset!r}: choose {AUTO}, {', '.join(PRESETS)}, or a YAML or JSON file of settings")
    return preset_for(target, name, _read(path), str(path))


def preset_for(target: Any, name: str, changes: dict[str, Any] | None = None, where: str = "preset") -> ParallelConfig:
    """A compact drafter for any supported target, from the target's sizes.

    Two attention sub-layers on the target's K/V, five taps from its second layer to its last but one, attention heads and
    RoPE as the reused layers have them, MLPs of the target's width.

    Args:
        changes: keys of :class:`ParallelConfig` that are to be otherwise; sections may be given in part.

    Raises:
        UsageError: the changes do not fit together, or not to the target.
    """
    changes = dict(changes or {})
    unknown = sorted(changes.keys() - ParallelConfig.model_fields.keys())
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(ParallelConfig.model_fields)}")
    own = TargetIdentity(
        name=name, family=target.model_type, layers=target.num_hidden_layers, hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )  # fmt: skip
    _check_identity(changes.pop("target", None), own, where)
    pattern: list[SubLayer] = changes.get("pattern", COMPACT_PATTERN)
    taps = changes.get("taps", default_taps(own.layers))
    kv_layers = changes.get("kv_layers", _kv_layers(target, taps, list(pattern).count("attention")))
    values: dict[str, Any] = {
        "target": own.model_dump(),
        "pattern": pattern,
        "hidden_size": own.hidden_size,
        "intermediate_size": target.intermediate_size,
        "rms_norm_eps": target.rms_norm_eps,
        "block_size": 5,
        "mamba": _mamba(own.hidden_size),
        "attention": _attention(target, kv_layers),
        "taps": taps,
        "kv_layers": kv_layers,
        "fusion_rank": own.hidden_size,
        "fusion_norm": True,
        "draft_vocab_size": min(own.vocab_size, 16384 if own.vocab_size <= 65536 else 32000),
        "head": {"kind": "markov", "rank": 48},
    }
    for key, value in changes.items():
        merge = key in ("mamba", "attention", "head") and isinstance(value, dict)
        values[key] = {**values[key], **value} if merge else value
    try:
        config = ParallelConfig.model_validate(values)
    except (ValidationError, TypeError) as error:
        raise UsageError(f"{where}: {explain(error)}") from error
    wrong = _misfit(config, target, heads=False)
    if wrong is not None:
        raise UsageError(f"{where} does not fit {name}: {wrong}")
    return config


def default_taps(layers: int) -> list[int]:
    """Five, evenly from the second layer to the last but one (as the paper's), fewer where the target has not so many."""
    first, last = min(1, layers - 1), max(layers - 2, 0)
    return sorted({max(first, int(first + (last - first) * i / 4)) for i in range(5)})


def layer_rope(target: Any, layer: int) -> dict[str, Any]:
    """RoPE parameters of one layer; some families have a set for each kind of layer."""
    parameters = target.rope_parameters
    by_kind = any(isinstance(p, dict) for p in parameters.values())
    return dict(parameters[target.layer_types[layer]] if by_kind else parameters)


def explain(error: Exception) -> str:
    """The first thing that a schema says, with its key, on one line."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "the whole"
    message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    more = "" if error.error_count() == 1 else f" (and {error.error_count() - 1} more)"
    return f"{where}: {message}{more}"


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise UsageError(f"cannot read the preset {path}: {reason(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"the preset {path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"the preset {path} must have keys and values, it is {type(raw).__name__}")
    return {str(key): value for key, value in raw.items()}


def _check_identity(given: Any, own: TargetIdentity, where: str) -> None:
    """A drafter's own config.json, used as a preset, says what it was made for."""
    if not isinstance(given, dict):
        return
    for key in ("layers", "hidden_size", "vocab_size"):
        if given.get(key, getattr(own, key)) != getattr(own, key):
            raise UsageError(
                f"{where} is for {given.get('name', 'another target')} ({key} {given[key]}), {own.name} has {getattr(own, key)}"
            )


def _fitted(config: ParallelConfig, target: Any, name: str) -> ParallelConfig:
    """A preset with the target's name and its layers' RoPE as it really is."""
    values = config.model_dump()
    values["target"]["name"] = name
    if values["attention"] is not None:
        values["attention"]["rope"] = [layer_rope(target, layer) for layer in config.kv_layers]
    return ParallelConfig.model_validate(values)


def _misfit(config: ParallelConfig, target: Any, heads: bool = True) -> str | None:
    """The first size in which a configuration and a target differ, in words."""
    pairs: dict[str, tuple[Any, Any]] = {
        "family": (config.target.family, target.model_type),
        "layers": (config.target.layers, target.num_hidden_layers),
        "hidden size": (config.target.hidden_size, target.hidden_size),
        "vocabulary": (config.target.vocab_size, target.vocab_size),
    }
    if config.attention is not None:
        pairs["K/V heads"] = (config.attention.kv_heads, target.num_key_value_heads)
        pairs["head size"] = (config.attention.head_dim, head_dim_of(target))
        if heads:
            pairs["attention heads"] = (config.attention.heads, target.num_attention_heads)
    return next((f"{what} {mine} against {theirs}" for what, (mine, theirs) in pairs.items() if mine != theirs), None)


def _mamba(hidden: int) -> dict[str, int]:
    """About the hidden size in heads of 64; B and C in up to four groups."""
    head_dim = min(64, hidden)
    heads = max(1, round(hidden / head_dim))
    return {"heads": heads, "head_dim": head_dim, "groups": next(g for g in (4, 3, 2, 1) if heads % g == 0)}


def _attention(target: Any, kv_layers: list[int]) -> dict[str, Any]:
    inside = [layer for layer in kv_layers if isinstance(layer, int) and 0 <= layer < target.num_hidden_layers]
    windows = [target.sliding_window for layer in inside if _slides(target, layer)]
    return {
        "heads": target.num_attention_heads,
        "kv_heads": target.num_key_value_heads,
        "head_dim": head_dim_of(target),
        "window": min([WINDOW, *windows]),
        "rope": [layer_rope(target, layer) for layer in inside],
    }


def _slides(target: Any, layer: int) -> bool:
    kinds = getattr(target, "layer_types", None)
    sliding = True if kinds is None else kinds[layer] == "sliding_attention"
    return sliding and bool(getattr(target, "sliding_window", None))


def _kv_layers(target: Any, taps: list[int], count: int) -> list[int]:
    """The highest tapped layers, moved to the nearest with full attention where the target has both kinds."""
    layers = target.num_hidden_layers
    tapped = [tap for tap in taps if isinstance(tap, int) and tap < layers] or [layers - 1]
    chosen = ([tapped[0]] * count + tapped)[-count:] if count else []
    full = [layer for layer in range(layers) if not _slides(target, layer)]
    return [min(full, key=lambda layer: abs(layer - near)) for near in chosen] if full else chosen
