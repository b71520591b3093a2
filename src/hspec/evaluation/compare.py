"""What ``hspec methods`` and ``hspec info --compare`` say: every method beside the others, from configurations alone.

No weights are read. A target that a preset was made for is known without its files or a network.
"""

from __future__ import annotations

from typing import Any

from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.drafters.methods import METHODS, TargetLayers, configuration, known_layers
from hspec.drafters.parameters import layout, parameters_by_part
from hspec.drafters.presets import preset_of
from hspec.evaluation.describe import memory_bytes
from hspec.targets.sources import ALIASES
from hspec.targets.sources import describe as target_config
from hspec.training.shape import AUTO, choose_shape, target_layers

PAPER_TARGETS = ("llama-3.1-8b", "qwen3-4b", "qwen3-8b")


def base_of(target: str) -> tuple[ParallelConfig, TargetLayers]:
    """H-Spec's configuration for a target, which those of all methods follow from, and what is known of its layers.

    Args:
        target: a preset's name, or a target as everywhere: ``smollm2``, a folder, a ``.gguf`` file, a hub id.

    Raises:
        UsageError: nothing of the kind.
    """
    name = ALIASES.get(target, target)
    known = preset_of(name)
    if known is not None:
        return known, known_layers(known)
    config = target_config(target)
    base = choose_shape(AUTO, name, config)
    assert isinstance(base, ParallelConfig)
    return base, target_layers(config)


def configurations(target: str) -> dict[str, DrafterConfig | None]:
    """Every method's configuration for a target, in the table's order; None where there is nothing to configure."""
    base, layers = base_of(target)
    return {name: configuration(name, base, layers) if m.derive else None for name, m in METHODS.items()}


def methods_table(target: str) -> list[dict[str, Any]]:
    """A row for every method: its parts, the passes for as many drafts as H-Spec makes there, the bytes that it keeps (bf16)."""
    rows = []
    for name, config in configurations(target).items():
        method = METHODS[name]
        passes = method.passes
        if passes is None:
            assert config is not None
            passes = config.max_draft
        kept = 0 if config is None else memory_bytes(config)
        rows.append(
            {
                "name": name, "context": method.context, "backbone": method.backbone, "head": method.head, "passes": passes,
                "kv_bytes_per_token": kept,
            }
        )  # fmt: skip
    return rows


def compare(target: str) -> list[dict[str, Any]]:
    """Trainable parameters of every method that has any, by part, and the difference to H-Spec's in percent of H-Spec's."""
    found = {name: config for name, config in configurations(target).items() if config is not None}
    parts = {name: parameters_by_part(config) for name, config in found.items()}
    own = sum(parts["hspec"].values())
    return [
        {
            "target": config.target.name,
            "method": name,
            "layout": layout(config),
            "parameters": sum(parts[name].values()),
            "difference_percent": round(100 * (sum(parts[name].values()) / own - 1), 2),
            "parameters_by_part": parts[name],
        }
        for name, config in found.items()
    ]
