"""A trainer on a tiny target, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hspec.drafters.config import ParallelConfig
from hspec.targets.target import Target
from hspec.training.config import GrowthStage, TrainConfig
from hspec.training.examples import Example
from hspec.training.initialise import initialise
from hspec.training.processes import Processes
from hspec.training.trainer import ALONE, Keep, Trainer
from tests.tiny import tiny_config

GROWTH = (GrowthStage(start=0.0, slots=1, density=1.0), GrowthStage(start=0.5, slots=3, density=0.5))


def documents(count: int, seed: int = 0, length: int = 24) -> list[Example]:
    """Token sequences that can be learnt: each is a short piece said again and again."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        piece = torch.randint(3, 150, (3 + i % 3,), generator=generator).tolist()
        tokens = (piece * length)[: length - i % 4]
        out.append(Example(f"{seed}-{i}", tokens, [t >= 4 for t in range(len(tokens))]))
    return out


def settings(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "steps": 8, "batch_tokens": 80, "warmup_steps": 2, "growth": GROWTH, "objective_chunk": 16, "warm_kl_until": 0.25,
        "tv_from": 0.75, "ema": 0.9, "learning_rate": 3e-3,
    }  # fmt: skip
    return TrainConfig(**(values | changes))


def small_config(target: Target, **changes: Any) -> ParallelConfig:
    return tiny_config(target, **({"block_size": 4, "fusion_rank": 16, "intermediate_size": 32} | changes))


def trainer_for(
    target: Target, folder: Path, config: TrainConfig | None = None, held_out: int = 4, count: int = 12,
    processes: Processes = ALONE, shard: bool = False, keep: Keep | None = None, **drafter: Any,
) -> Trainer:  # fmt: skip
    shape = small_config(target, **drafter)
    new = initialise(shape, target, torch.arange(shape.draft_vocab_size), seed=1)
    held = documents(held_out, seed=9)
    return Trainer(config or settings(), target, new, documents(count), held, folder, processes, shard, keep)
