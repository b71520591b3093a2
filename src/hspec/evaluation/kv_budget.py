"""What a token costs in KV cache, for a target and for a drafter beside it.

Everything comes from configurations; no weights are read. The paper's Table 1 is :attr:`KVCost.growth`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.drafters.family import meta_drafter
from hspec.drafters.methods import METHODS, configuration, method
from hspec.drafters.parameters import parameters_by_part
from hspec.drafters.presets import PUBLISHED_INJECTION, attention_layers, preset_of
from hspec.errors import UsageError
from hspec.evaluation.compare import base_of
from hspec.targets.cache import CacheShape, head_dim_of
from hspec.targets.sources import ALIASES
from hspec.targets.sources import describe as target_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
WEIGHT_BYTES = 2
"""Of a parameter, in bf16."""


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
        bound = "" if self.window is None else f", of at most {self.window:,} tokens: bounded, and no part of the growth"
        total = s.bytes_per_token(dtype)
        return (
            f"{s.layers} layers x {s.kv_heads} KV heads x {s.head_dim} x 2 (K, V) x {dtype.itemsize} bytes = {total:,}{bound}"
        )

    def of_rank(self, ranks: int) -> Cache:
        """The share of one of ``ranks``: KV heads are dealt out, or each is kept by several where there are fewer of them.

        Raises:
            UsageError: they cannot be dealt out evenly.
        """
        heads = self.shape.kv_heads
        if heads % ranks and ranks % heads:
            raise UsageError(f"--tp {ranks} does not divide {heads} KV heads, nor do they divide it: choose another --tp")
        return Cache(CacheShape(self.shape.layers, max(1, heads // ranks), self.shape.head_dim), self.window)


@dataclass(frozen=True)
class RecurrentState:
    """What layers of linear attention (gated delta rule) keep of a request, however long it gets.

    A matrix ``[key_dim, value_dim]`` for each value head in fp32, and the last ``kernel - 1`` inputs of the convolution over
    queries, keys and values in bf16. An engine may hold several while it checks drafts; one is counted.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def bytes(self, ranks: int = 1) -> int:
        """Of one request, on each of ``ranks``, over which the heads are dealt out.

        Raises:
            UsageError: the heads cannot be dealt out evenly.
        """
        if self.key_heads % ranks or self.value_heads % ranks:
            raise UsageError(
                f"--tp {ranks} does not divide the {self.key_heads} key and {self.value_heads} value heads of linear attention: "
                "choose another --tp"
            )
        matrices = self.value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return self.layers * (matrices + self._channels * (self.kernel - 1) * torch.bfloat16.itemsize) // ranks

    @property
    def _channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def arithmetic(self) -> str:
        return (
            f"{self.layers} layers of linear attention x ({self.value_heads} heads x {self.key_dim} x {self.value_dim} x 4 bytes + "
            f"{self._channels:,} channels x {self.kernel - 1} x 2 bytes) = {self.bytes():,} a request, however long"
        )


RECURRENT = {
    "Qwen/Qwen3.5-27B": RecurrentState(48, 16, 48, 128, 128, 4),
    "Qwen/Qwen3.5-397B-A17B": RecurrentState(45, 16, 64, 128, 128, 4),
}
"""Of targets of presets. Their published configurations: linear_num_key_heads, linear_num_value_heads and so on."""


@dataclass(frozen=True)
class TargetMemory:
    """What a target keeps of a request."""

    heads: int
    """Query heads of a layer with KV."""
    caches: tuple[Cache, ...]
    """By kind of layer."""
    state: RecurrentState | None = None


def target_memory(target: str) -> TargetMemory:
    """What a target keeps; of a preset's target nothing is fetched.

    Args:
        target: a preset's name, or a target as everywhere.

    Raises:
        UsageError: no such target, one of a family that is not supported (MLA, say, whose cache is of another kind), or one whose
            layers all slide.
    """
    known = preset_of(ALIASES.get(target, target))
    return _memory_of_config(target, target_config(target)) if known is None else _memory_of_preset(known)


def _memory_of_config(target: str, config: Any) -> TargetMemory:
    window = getattr(config, "sliding_window", None)
    # Mistral says no kinds: either all of its layers slide or none.
    alike = "full_attention" if window is None else "sliding_attention"
    kinds = list(getattr(config, "layer_types", None) or [alike] * config.num_hidden_layers)
    full, sliding = kinds.count("full_attention"), kinds.count("sliding_attention")
    if not full:
        raise UsageError(f"{target} has no layer that keeps all tokens, so its KV cache does not grow past {window} tokens")
    head_dim = head_dim_of(config)
    caches = [Cache(CacheShape(full, config.num_key_value_heads, head_dim))]
    if sliding:
        caches.append(Cache(CacheShape(sliding, config.num_key_value_heads, head_dim), window))
    return TargetMemory(config.num_attention_heads, tuple(caches))


def _memory_of_preset(preset: ParallelConfig) -> TargetMemory:
    attention = preset.attention
    assert attention is not None
    shape = CacheShape(len(attention_layers(preset.target)), attention.kv_heads, attention.head_dim)
    return TargetMemory(attention.heads, (Cache(shape),), RECURRENT.get(preset.target.name))


@dataclass(frozen=True)
class KVCost:
    """Of one target with one drafter."""

    target: str
    method: str
    kept: TargetMemory
    drafter_cache: Cache | None
    drafter_weights: int
    """Bytes in bf16 of the drafter's parameters, and of the LM head's rows of its draft vocabulary."""
    dtype: torch.dtype
    """Of K and V, the drafter's too."""
    notes: tuple[str, ...] = ()

    @property
    def target_bytes(self) -> int:
        """Of every further token, in layers that keep them all."""
        return sum(c.shape.bytes_per_token(self.dtype) for c in self.kept.caches if c.window is None)

    @property
    def drafter_bytes(self) -> int:
        return 0 if self.drafter_cache is None else self.drafter_cache.shape.bytes_per_token(self.dtype)

    @property
    def growth(self) -> float:
        """Bytes a token with the drafter over those without."""
        return (self.target_bytes + self.drafter_bytes) / self.target_bytes

    def as_dict(self) -> dict[str, Any]:
        state, drafter = self.kept.state, self.drafter_cache
        return {
            "target": self.target,
            "method": self.method,
            "target_bytes": self.target_bytes,
            "drafter_bytes": self.drafter_bytes,
            "growth": self.growth,
            "state_bytes_a_request": 0 if state is None else state.bytes(),
            "arithmetic": {
                "target": [c.arithmetic(self.dtype) for c in self.kept.caches],
                "drafter": "nothing is kept" if drafter is None else drafter.arithmetic(self.dtype),
                "state": "none" if state is None else state.arithmetic,
            },
            "notes": list(self.notes),
        }


def kv_costs(target: str, dtype: str = "bf16", methods: Iterable[str] = METHODS) -> dict[str, KVCost]:
    """Of a target with each of these methods, by default all of ``hspec methods``.

    Args:
        target: a preset's name, or a target as everywhere. dtype: of K and V, one of :data:`DTYPES`.

    Raises:
        UsageError: no such target, type or method, or a target whose cache is of a kind that is not counted.
    """
    kept, kind = target_memory(target), _dtype(dtype)
    base, layers = base_of(target)
    derived = {name: configuration(name, base, layers) if method(name).derive else None for name in methods}
    return {name: _cost(target, name, kept, config, kind) for name, config in derived.items()}


def kv_cost(target: str, config: DrafterConfig, dtype: str = "bf16") -> KVCost:
    """Of a drafter's own configuration.

    Raises:
        UsageError: as :func:`kv_costs`, or the drafter is for a target of another size.
    """
    kept, own, asked = target_memory(target), config.target, base_of(target)[0].target
    if (own.layers, own.hidden_size) != (asked.layers, asked.hidden_size):
        raise UsageError(
            f"the drafter is for {own.name} ({own.layers} layers of {own.hidden_size}), not for {target} ({asked.layers} of "
            f"{asked.hidden_size}): give its target with --target"
        )
    return _cost(target, config.method, kept, config, _dtype(dtype))


def _cost(target: str, name: str, kept: TargetMemory, config: DrafterConfig | None, dtype: torch.dtype) -> KVCost:
    if config is None:
        return KVCost(target, name, kept, None, 0, dtype)
    shape = meta_drafter(config).memory_shape
    notes: tuple[str, ...] = ()
    if shape is not None and PUBLISHED_INJECTION.get(config.target.name) == (shape.layers, shape.kv_heads, shape.head_dim):
        notes = ("that the published drafters have this K/V shape is an assumption: it makes the 24 KiB that the paper gives",)
    weights = WEIGHT_BYTES * (sum(parameters_by_part(config).values()) + config.draft_vocab_size * config.hidden_size)
    return KVCost(target, name, kept, None if shape is None else Cache(shape), weights, dtype, notes)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UsageError(f"--kv-dtype {name}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]
