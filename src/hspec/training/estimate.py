"""How long a run will take: its floating-point operations over what this machine's matrix products reach.

An estimate from settings alone; the shares below were measured on one machine (two Zen 4 cores, SmolLM2), and others differ.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.drafters.parameters import parameters_by_part
from hspec.training.config import GrowthStage, TrainConfig

TRAINING_SHARE = 0.62
"""Of the products' speed, what a whole training step reaches."""
ANSWERING_SHARE = 0.18
"""The same for answering in a large batch, which reads K/V most of the time."""
SUPERVISED_SHARE = 0.8
"""Of a batch's tokens, those that the assistant wrote; the rest are prompts and padding."""
ANSWER_TOKENS = 200
"""Mean length of an answer that may have 256."""


@dataclass(frozen=True)
class TargetSize:
    """Of a target, what its forward costs."""

    layers: int
    """Parameters of all decoder layers."""
    head: int
    """Parameters of the LM head."""

    @staticmethod
    def of(preset: ParallelConfig) -> TargetSize:
        """Of the target of an H-Spec configuration whose attention and MLPs are as wide as the target's."""
        a = preset.attention
        attention = 0 if a is None else 2 * preset.hidden_size * a.head_dim * (a.heads + a.kv_heads)
        layer = attention + 3 * preset.hidden_size * preset.intermediate_size
        return TargetSize(layer * preset.target.layers, preset.target.vocab_size * preset.hidden_size)


def block_flops(config: DrafterConfig, slots: int) -> float:
    """Forward and backward of the drafter for one block: three products with each weight for each slot, two with the frozen head.

    The anchor is a slot too. What the drafter does once for every position of a document is counted once a block.
    """
    parts = parameters_by_part(config)
    once = parts["fusion"]
    low_rank = parts["causal_head"] * config.draft_vocab_size / (config.draft_vocab_size + config.target.vocab_size)
    backbone = sum(parts.values()) - parts["causal_head"] - parts["confidence_head"] - once
    head = config.draft_vocab_size * config.hidden_size
    return 6 * (backbone * (slots + 1) + once) + slots * (4 * head + 6 * low_rank)


def step_flops(config: DrafterConfig, target: TargetSize, train: TrainConfig, stage: GrowthStage) -> float:
    """Of one optimiser step: the frozen target over the batch, its logits at the slots' rows, and the blocks."""
    blocks = train.batch_tokens * SUPERVISED_SHARE * stage.density
    rows = min(blocks + stage.slots, train.batch_tokens)
    return train.batch_tokens * 2 * target.layers + rows * 2 * target.head + blocks * block_flops(config, stage.slots)


def total_flops(config: DrafterConfig, target: TargetSize, train: TrainConfig) -> float:
    """Of a whole run, stage by stage."""
    ends = [*(stage.start for stage in train.growth[1:]), 1.0]
    return sum(
        train.steps * (end - stage.start) * step_flops(config, target, train, stage)
        for stage, end in zip(train.growth, ends, strict=True)
    )


def total_blocks(train: TrainConfig) -> float:
    """About how many blocks a run will have seen."""
    ends = [*(stage.start for stage in train.growth[1:]), 1.0]
    share = sum((end - stage.start) * stage.density for stage, end in zip(train.growth, ends, strict=True))
    return train.steps * train.batch_tokens * SUPERVISED_SHARE * share


def product_speed(precision: str, device: str = "cpu", seconds: float = 0.2) -> float:
    """FLOP a second of products as training has them, tried out now with the threads that are set."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, device=device).to(dtype) for size in ((512, 576), (576, 1536)))
    a @ b
    done, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        a @ b
        done += 1
        if device != "cpu":
            torch.cuda.synchronize()
    return done * 2 * 512 * 576 * 1536 / spent


def duration(seconds: float) -> str:
    """In words of two figures: 40 s, 12 min, 3.5 h, 4.0 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            value = seconds / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{seconds:.0f} s"
