"""How many requests a GPU holds beside the weights, with a drafter's cache and without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hspec.drafters.presets import FULL_ATTENTION, preset_of
from hspec.errors import UsageError
from hspec.evaluation.describe import describe_target
from hspec.evaluation.kv_budget import WEIGHT_BYTES, KVCost
from hspec.targets.sources import ALIASES
from hspec.targets.sources import describe as target_config
from hspec.training.estimate import TargetSize

TIED = {"Qwen/Qwen3-4B", "smollm2-135m-instruct-q4"}
"""Targets of presets whose LM head is their embedding."""
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Plan:
    """How many requests of one length fit on the GPUs that share a target."""

    requests: int
    without_drafter_cache: int
    """The same with a drafter of the same weights that keeps nothing."""
    free_bytes: float
    """For requests, on each GPU."""
    request_bytes: int
    """Of one request, on each GPU."""
    arithmetic: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "requests_without_drafter_cache": self.without_drafter_cache,
            "more": self.without_drafter_cache - self.requests,
            "bytes_free": self.free_bytes,
            "bytes_a_request": self.request_bytes,
            "arithmetic": self.arithmetic,
        }


def plan(cost: KVCost, memory: float, weights: float, context: int, ranks: int, reserve: float) -> Plan:
    """Requests of ``context`` tokens that fit beside the weights; target and drafter are split over the ranks alike.

    Args:
        memory, reserve: bytes of each GPU, and of them what is left for activations and the like.
        weights: the target's, bytes.

    Raises:
        UsageError: nothing is left for requests, or the heads cannot be dealt out over the ranks.
    """
    if cost.kept.heads % ranks:
        raise UsageError(
            f"--tp {ranks} does not divide the {cost.kept.heads} attention heads of {cost.target}: choose another --tp"
        )
    free = memory - reserve - (weights + cost.drafter_weights) / ranks
    sums = (
        f"{_gb(memory)} a GPU - {_gb(reserve)} in reserve - {_gb(weights / ranks)} of the target's weights - "
        f"{_gb(cost.drafter_weights / ranks)} of the drafter's"
    )
    if free <= 0:
        raise UsageError(f"nothing is left for requests: {sums}; more memory or GPUs are needed (--memory, --tp)")
    target = sum(c.of_rank(ranks).bytes(context, cost.dtype) for c in cost.kept.caches)
    state = 0 if cost.kept.state is None else cost.kept.state.bytes(ranks)
    own = 0 if cost.drafter_cache is None else cost.drafter_cache.of_rank(ranks).bytes(context, cost.dtype)
    whole = target + state + own
    sums += f" = {_gb(free)}; {context:,} tokens: {target:,} of KV + {state:,} of state + {own:,} of the drafter's KV = {whole:,} bytes"
    return Plan(int(free // whole), int(free // (target + state)), free, whole, sums)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def weight_bytes(target: str) -> float:
    """Of a target's parameters in bf16.

    Raises:
        UsageError: they cannot be told from what is known of it.
    """
    known = preset_of(ALIASES.get(target, target))
    if known is None:
        return WEIGHT_BYTES * describe_target(target_config(target))["parameters"]
    if known.target.name in FULL_ATTENTION:
        raise UsageError(f"how much the weights of {known.target.name} take is not known here: give --weights, as in 54GB")
    size = TargetSize.of(known)
    tied = known.target.name in TIED
    return WEIGHT_BYTES * (size.layers + size.head * (1 if tied else 2))


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
