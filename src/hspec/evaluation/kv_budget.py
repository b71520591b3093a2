"""What a token costs in KV cache, for a target and for a drafter beside it, and how many requests a GPU then holds.

Everything comes from configurations; no weights are read. The paper's Table 1 is :attr:`KVCost.growth`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.drafters.family import meta_drafter
from hspec.drafters.methods import METHODS
from hspec.drafters.parameters import parameters_by_part
from hspec.drafters.presets import FULL_ATTENTION, attention_layers, preset_of
from hspec.errors import UsageError
from hspec.evaluation.compare import configurations
from hspec.evaluation.describe import describe_target
from hspec.targets.cache import CacheShape
from hspec.targets.sources import describe as target_config
from hspec.training.estimate import TargetSize

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
WEIGHT_BYTES = 2
"""Of a parameter, in bf16."""
TIED = {"Qwen/Qwen3-4B", "smollm2-135m-instruct-q4"}
"""Targets of presets whose LM head is their embedding."""
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Cache:
    """Of ``shape``, all layers alike; ``window`` tokens at most where they slide."""

    shape: CacheShape
    window: int | None = None

    def bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Of one request that has so many tokens."""
        kept = tokens if self.window is None else min(tokens, self.window)
        return kept * self.shape.bytes_per_token(dtype)

    def arithmetic(self, dtype: torch.dtype) -> str:
        s = self.shape
        bound = "" if self.window is None else f", at most {self.window:,} tokens"
        total = s.bytes_per_token(dtype)
        return (
            f"{s.layers} layers x {s.kv_heads} KV heads x {s.head_dim} x 2 (K, V) x {dtype.itemsize} bytes = {total:,}{bound}"
        )

    def of_rank(self, ranks: int) -> Cache:
        """The share of one of ``ranks``: KV heads are dealt out, and kept whole by several where there are fewer of them."""
        heads = math.ceil(self.shape.kv_heads / ranks)
        return Cache(CacheShape(self.shape.layers, heads, self.shape.head_dim), self.window)


@dataclass(frozen=True)
class KVCost:
    """Of one target with one drafter."""

    target: str
    method: str
    target_caches: tuple[Cache, ...]
    drafter_cache: Cache | None
    dtype: torch.dtype
    notes: tuple[str, ...] = ()

    @property
    def target_bytes(self) -> int:
        """Of every further token, in layers that keep them all."""
        return sum(c.shape.bytes_per_token(self.dtype) for c in self.target_caches if c.window is None)

    @property
    def drafter_bytes(self) -> int:
        return 0 if self.drafter_cache is None else self.drafter_cache.shape.bytes_per_token(self.dtype)

    @property
    def growth(self) -> float:
        """Bytes a token with the drafter over those without."""
        return (self.target_bytes + self.drafter_bytes) / self.target_bytes

    @property
    def caches(self) -> tuple[Cache, ...]:
        return self.target_caches if self.drafter_cache is None else (*self.target_caches, self.drafter_cache)

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "method": self.method,
            "target_bytes": self.target_bytes,
            "drafter_bytes": self.drafter_bytes,
            "growth": self.growth,
            "arithmetic": {
                "target": [c.arithmetic(self.dtype) for c in self.target_caches],
                "drafter": "nothing is kept" if self.drafter_cache is None else self.drafter_cache.arithmetic(self.dtype),
            },
            "notes": list(self.notes),
        }


def kv_costs(target: str, dtype: str = "bf16") -> dict[str, KVCost]:
    """Of every method of ``hspec methods``, in the table's order.

    Args:
        target: a preset's name, or a target as everywhere. dtype: one of :data:`DTYPES`.

    Raises:
        UsageError: no such target or type, or a target whose cache is of a kind that is not counted.
    """
    kept, notes = target_caches(target)
    return {
        name: KVCost(target, name, kept, _drafter_cache(config), _dtype(dtype), notes)
        for name, config in configurations(target).items()
        if name in METHODS
    }


def kv_cost(target: str, config: DrafterConfig, dtype: str = "bf16") -> KVCost:
    """Of a drafter's own configuration; raises as :func:`kv_costs`."""
    kept, notes = target_caches(target)
    return KVCost(target, config.method, kept, _drafter_cache(config), _dtype(dtype), notes)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UsageError(f"--kv-dtype {name}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _drafter_cache(config: DrafterConfig | None) -> Cache | None:
    shape = None if config is None else meta_drafter(config).memory_shape
    return None if shape is None else Cache(shape)


def target_caches(target: str) -> tuple[tuple[Cache, ...], tuple[str, ...]]:
    """What a target keeps of its tokens, by kind of layer, and what is left out of account.

    Raises:
        UsageError: no such target, or one with latent attention (MLA), whose cache is of another kind.
    """
    known = preset_of(target)
    if known is not None:
        return _caches_of_preset(known)
    config = target_config(target)
    if getattr(config, "kv_lora_rank", None):
        raise UsageError(f"{target} has latent attention (kv_lora_rank {config.kv_lora_rank}), whose cache is not counted here")
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    heads = config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = []
    if full := kinds.count("full_attention"):
        found.append(Cache(CacheShape(full, heads, head_dim)))
    if sliding := kinds.count("sliding_attention"):
        found.append(Cache(CacheShape(sliding, heads, head_dim), config.sliding_window))
    if not full:
        raise UsageError(f"{target} has no layer that keeps all tokens, so its KV cache does not grow")
    return tuple(found), ()


def _caches_of_preset(preset: ParallelConfig) -> tuple[tuple[Cache, ...], tuple[str, ...]]:
    attention = preset.attention
    assert attention is not None
    layers = attention_layers(preset.target)
    notes: tuple[str, ...] = ()
    if preset.target.name in FULL_ATTENTION:
        notes = (
            f"{preset.target.layers - len(layers)} layers of linear attention keep a state of fixed size a request, not counted",
        )
    return (Cache(CacheShape(len(layers), attention.kv_heads, attention.head_dim)),), notes


# -- planning ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How many requests of one length fit on the GPUs of a replica."""

    requests: int
    without_drafter_cache: int
    """The same with a drafter of the same weights that keeps nothing."""
    free_bytes: float
    """For KV, on each GPU."""
    request_bytes: int
    """Of one request, on each GPU."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "requests_without_drafter_cache": self.without_drafter_cache,
            "more": self.without_drafter_cache - self.requests,
            "kv_bytes_free": self.free_bytes,
            "kv_bytes_a_request": self.request_bytes,
        }


def plan(cost: KVCost, memory: float, weights: float, drafter_weights: float, context: int, ranks: int, reserve: float) -> Plan:
    """Requests of ``context`` tokens that fit beside the weights.

    The target's weights are split over the ranks; the drafter's are on every one of them.

    Args:
        memory, reserve: bytes of each GPU, and of them what is left for activations and the like.
        weights, drafter_weights: bytes.

    Raises:
        UsageError: nothing is left for KV.
    """
    free = memory - reserve - weights / ranks - drafter_weights
    if free <= 0:
        raise UsageError(
            f"nothing is left for KV: of {memory / 1e9:.1f} GB a GPU, {weights / ranks / 1e9:.1f} GB are the target's weights, "
            f"{drafter_weights / 1e9:.1f} the drafter's and {reserve / 1e9:.1f} in reserve: more memory or GPUs (--memory, --tp)"
        )
    target = sum(c.of_rank(ranks).bytes(context, cost.dtype) for c in cost.target_caches)
    whole = sum(c.of_rank(ranks).bytes(context, cost.dtype) for c in cost.caches)
    return Plan(int(free // whole), int(free // target), free, whole)


def weight_bytes(target: str) -> float:
    """Of a target's parameters in bf16.

    Raises:
        UsageError: they cannot be told from what is known of it.
    """
    known = preset_of(target)
    if known is None:
        return WEIGHT_BYTES * describe_target(target_config(target))["parameters"]
    if known.target.name in FULL_ATTENTION:
        raise UsageError(f"how much the weights of {known.target.name} take is not known here: give --weights, as in 54GB")
    size = TargetSize.of(known)
    tied = known.target.name in TIED
    return WEIGHT_BYTES * (size.layers + size.head * (1 if tied else 2))


def drafter_weight_bytes(config: DrafterConfig | None) -> float:
    """Of a drafter's trainable parameters in bf16, and of the LM head's rows of its draft vocabulary."""
    if config is None:
        return 0.0
    return WEIGHT_BYTES * (sum(parameters_by_part(config).values()) + config.draft_vocab_size * config.hidden_size)


def parse_bytes(option: str, text: str) -> float:
    """``80GB``, ``24GiB``, ``500MB`` or a number of bytes.

    Raises:
        UsageError: something else.
    """
    number = text.strip().upper().rstrip("BIKMG")
    unit = text.strip().upper()[len(number) :] or "B"
    try:
        value = float(number) * (1.0 if unit == "B" else _UNITS[unit])
    except (ValueError, KeyError):
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{option} {text}: give a size, as in 80GB, 24GiB or 500MB")
    return value
