"""How many parameters a drafter trains, by part."""

from __future__ import annotations

import torch

from hspec.drafters.config import DrafterConfig
from hspec.drafters.hspec import HSpecDrafter


def parameters_by_part(config: DrafterConfig) -> dict[str, int]:
    """Trainable parameters, counted on the meta device."""
    with torch.device("meta"):
        drafter = HSpecDrafter(
            config,
            torch.empty(config.target.vocab_size, config.hidden_size),
            torch.empty(config.draft_vocab_size, config.hidden_size),
            torch.empty(config.draft_vocab_size, dtype=torch.int64),
        )
    counts: dict[str, int] = {}
    names = {id(layer): kind for layer, kind in zip(drafter.layers, config.pattern, strict=True)}
    for layer in drafter.layers:
        kind = names[id(layer)]
        counts[kind] = counts.get(kind, 0) + sum(p.numel() for p in layer.parameters())
    other = {"state_seed": drafter.seed, "markov_head": drafter.markov, "confidence_head": drafter.confidence}
    for name, module in other.items():
        counts[name] = 0 if module is None else sum(p.numel() for p in module.parameters())
    counts["norms_and_mask"] = sum(p.numel() for p in drafter.parameters()) - sum(counts.values())
    return counts
