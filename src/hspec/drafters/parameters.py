"""How many parameters a drafter trains, by part."""

from __future__ import annotations

from torch import nn

from hspec.drafters.attention import PrefixAttention
from hspec.drafters.config import DrafterConfig, EagleConfig, ParallelConfig
from hspec.drafters.convolution import BlockConvolution
from hspec.drafters.family import meta_drafter
from hspec.drafters.fusion import Fusion
from hspec.drafters.heads.causal import CausalHead
from hspec.drafters.heads.confidence import ConfidenceHead
from hspec.drafters.mamba import MambaMixer
from hspec.drafters.mlp import GatedMLP
from hspec.drafters.redrafter import ReDrafter

PARTS: dict[type[nn.Module], str] = {
    MambaMixer: "mamba",
    PrefixAttention: "attention",
    GatedMLP: "mlp",
    BlockConvolution: "convolution",
    Fusion: "fusion",  # with the projections to the Mamba states, if it seeds them
    CausalHead: "causal_head",
    ConfidenceHead: "confidence_head",
}
CELL = "cell"
"""ReDrafter's recurrence and the MLP that reads it."""
REST = "norms_and_mask"


def parameters_by_part(config: DrafterConfig) -> dict[str, int]:
    """Trainable parameters, counted on the meta device; parts that a drafter has not are 0."""
    drafter = meta_drafter(config)
    counts = dict.fromkeys([*PARTS.values(), CELL, REST], 0)
    for name, module in drafter.named_modules():
        part = next((own for kind, own in PARTS.items() if isinstance(module, kind)), None)
        if name == "fc":  # EAGLE's, which has no module of its own
            part = PARTS[Fusion]
        elif isinstance(drafter, ReDrafter) and isinstance(module, nn.Linear):
            part = CELL
        if part is not None:
            counts[part] += sum(p.numel() for p in module.parameters())
    counts[REST] = sum(p.numel() for p in drafter.parameters()) - sum(counts.values())
    return counts


def layout(config: DrafterConfig) -> str:
    """A drafter's backbone in words."""
    if isinstance(config, ParallelConfig):
        return " ".join(config.pattern)
    return f"{config.layers} x (attention mlp)" if isinstance(config, EagleConfig) else "recurrent cell"
