"""Checkpoints of earlier formats, brought up to the one that is written now.

Format 1 (H-Spec only) had ``markov_rank`` where there is a causal head now, and ``use_target_kv`` where there is
``attention.context``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def upgrade_config(raw: dict[str, Any]) -> dict[str, Any]:
    """A configuration of any format -> one of the newest; what is wrong with it is left for the schema to say."""
    if raw.get("format", 1) != 1 or "format" not in raw:
        return raw
    raw = {**raw, "format": 2}
    rank = raw.pop("markov_rank", 256)
    raw["head"] = {"kind": "markov", "rank": rank} if rank else None
    reads = raw.pop("use_target_kv", True)
    if isinstance(raw.get("attention"), dict):
        raw["attention"] = {**raw["attention"], "context": "target" if reads else "none"}
    return raw


def upgrade_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensor names of any format -> those of the newest."""
    return {f"causal.{name[len('markov.') :]}" if name.startswith("markov.") else name: w for name, w in weights.items()}
