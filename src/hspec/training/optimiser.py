"""AdamW for a drafter: which weights decay, which learn faster, how fast at which step; and its memory as whole tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hspec.drafters.drafter import Drafter
from hspec.training.config import TrainConfig
from hspec.training.parallel import shared_out_like, whole


def make_optimiser(drafter: Drafter, config: TrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(_groups(drafter, config), lr=config.learning_rate, betas=config.betas, fused=True)


def _groups(drafter: Drafter, config: TrainConfig) -> list[dict[str, Any]]:
    """Weight decay for matrices only: norms, biases, A_log, D, dt_bias and the mask embedding are vectors, and have none.
    The causal head learns faster."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, p in drafter.named_parameters():
        groups.setdefault((p.dim() < 2, name.startswith("causal.")), []).append(p)
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if plain else config.weight_decay,
            "factor": config.head_learning_rate if causal else 1.0,
        }
        for (plain, causal), parameters in groups.items()
    ]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear over the warm-up, then a cosine to a fraction of the peak; it is a function of the step, so resuming needs no state."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    low = config.final_learning_rate
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate * group["factor"]


def state_of(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Its memory with whole tensors, as if one process had trained; every process must come here."""
    state = optimiser.state_dict()
    memory = {index: {name: whole(value) for name, value in kept.items()} for index, kept in state["state"].items()}
    return {**state, "state": memory}


def load_state(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take up what :func:`state_of` gave.

    Raises:
        ValueError, KeyError: it is of other parameters.
    """
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    memory = {
        index: {name: shared_out_like(value, parameters[index]) for name, value in kept.items()}
        for index, kept in state["state"].items()
    }
    optimiser.load_state_dict({**state, "state": memory})
