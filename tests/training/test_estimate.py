"""The estimate of a run's cost: its formula against counted operations, and its words."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hspec.drafters.methods import configuration
from hspec.targets.target import Target
from hspec.training.config import GrowthStage
from hspec.training.estimate import TargetSize, block_flops, duration, product_speed, step_flops, total_blocks, total_flops
from hspec.training.initialise import initialise
from hspec.training.loss import BlockLoss
from hspec.training.objective import LossWeights
from tests.tiny import tiny_config, tiny_target
from tests.training.helpers import settings, trainer_for


@pytest.mark.parametrize("method", ["hspec", "dspark", "mamba-only", "redrafter"])
def test_block_flops_are_those_that_a_step_does(tmp_path, method: str) -> None:  # type: ignore[no-untyped-def]
    target = tiny_target(layers=4, hidden=48, linears="plain")
    base = tiny_config(target, pattern=("mamba", "mlp", "mamba", "attention", "mlp"), block_size=4, fusion_rank=48)
    config = configuration(method, base)
    run = trainer_for(target, tmp_path)
    drafter = initialise(config, target, torch.arange(config.draft_vocab_size), seed=1)
    blocks = run._blocks(run.stream.batch(0), 3, 1.0, 0, run.features)
    loss = BlockLoss(drafter, target, settings())
    with FlopCounterMode(display=False) as counter:
        loss(blocks, LossWeights(0.1, 0.4, 0.5), 0.0).total.backward()
    heads = 2 * target.vocab_size * target.hidden_size * len(torch.unique(blocks.rows.flatten()))
    counted = counter.get_total_flops() - heads
    estimated = blocks.weight[..., 0].numel() * block_flops(config, 3)
    # Attention's scores, convolutions and scans are left out of the estimate; blocks with fewer slots are in it whole.
    assert 0.6 < estimated / counted < 1.5


def test_stages_add_up(target: Target) -> None:
    config, size = tiny_config(target), TargetSize(1000, 100)
    one = settings(steps=100, growth=(GrowthStage(start=0.0, slots=2, density=0.5),))
    two = settings(
        steps=100, growth=(GrowthStage(start=0.0, slots=2, density=0.5), GrowthStage(start=0.3, slots=4, density=1.0))
    )
    assert total_flops(config, size, one) == pytest.approx(100 * step_flops(config, size, one, one.growth[0]))
    expected = 30 * step_flops(config, size, two, two.growth[0]) + 70 * step_flops(config, size, two, two.growth[1])
    assert total_flops(config, size, two) == pytest.approx(expected)
    assert total_blocks(two) == pytest.approx(two.batch_tokens * 0.8 * (30 * 0.5 + 70))


def test_target_size() -> None:
    target = tiny_target(layers=3, hidden=64)
    size = TargetSize.of(tiny_config(target))
    body = sum(p.numel() for n, p in target.model.model.layers.named_parameters() if "norm" not in n)
    assert size.head == target.vocab_size * 64 and body in (0, size.layers)  # 0 where the weights are packed


@pytest.mark.parametrize(
    ("seconds", "words"), [(45, "45 s"), (150, "2.5 min"), (1500, "25 min"), (9000, "2.5 h"), (4e5, "4.6 days")]
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_speed_is_measured() -> None:
    assert product_speed("fp32", seconds=0.02) > 1e7
