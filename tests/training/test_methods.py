"""Every method learns under the one recipe, is saved, and drafts what it has learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request
from hspec.drafters.checkpoint import load_drafter
from hspec.drafters.config import ParallelConfig
from hspec.drafters.methods import METHODS, configuration
from hspec.targets.target import Target
from hspec.training.config import GrowthStage
from hspec.training.initialise import initialise
from hspec.training.objective import LossWeights
from hspec.training.trainer import Trainer
from tests.tiny import tiny_config, tiny_target
from tests.training.helpers import documents, settings

TRAINED = [name for name, method in METHODS.items() if method.derive is not None]
STEPS = 40


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=4, hidden=48, seed=4)


def base(target: Target, **changes: object) -> ParallelConfig:
    return tiny_config(target, **({"block_size": 4, "fusion_rank": 48, "intermediate_size": 64} | changes))  # type: ignore[arg-type]


def trainer(target: Target, method: str, folder: Path, **changes: object) -> Trainer:
    config = configuration(method, base(target))
    drafter = initialise(config, target, torch.arange(config.draft_vocab_size), seed=1)
    recipe = settings(
        steps=STEPS,
        batch_tokens=160,
        growth=(GrowthStage(start=0.0, slots=3, density=1.0),),
        warm_kl_until=0.9,
        tv_from=1.0,
        **changes,
    )
    return Trainer(recipe, target, drafter, documents(24), documents(6, seed=9), folder)


@pytest.mark.parametrize("method", TRAINED)
def test_loss_falls_and_the_checkpoint_drafts(target: Target, tmp_path: Path, method: str) -> None:
    run = trainer(target, method, tmp_path)
    steps = [run.train_step() for _ in range(STEPS)]
    losses = [float(sums.mean.detach()) for sums, _ in steps]
    acceptance = [float(sums.stats.acceptance.mean()) for sums, _ in steps]
    assert sum(losses[-5:]) < 0.93 * sum(losses[:5])
    assert sum(acceptance[-5:]) > 1.05 * sum(acceptance[:5])
    run.save()
    loaded = load_drafter(tmp_path, target)
    assert loaded.config == run.drafter.config
    prompts = [tuple(e.tokens[:9]) for e in documents(3, seed=9)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    requests = [Request(prompt, params) for prompt in prompts]
    drafted = Engine(target, loaded).generate(requests)
    assert [r.tokens for r in drafted] == [r.tokens for r in Engine(target).generate(requests)]


@pytest.mark.parametrize("method", TRAINED)
def test_gradients_reach_every_parameter(target: Target, tmp_path: Path, method: str) -> None:
    run = trainer(target, method, tmp_path)
    for _ in range(2):  # some start at zero, and let no gradient through to others at the first step
        run.train_step()
    blocks = run._blocks(run.stream.batch(3), 3, 1.0, 3, run.features)
    sums = run.loss(blocks, LossWeights(0.1, 0.4, 0.5), 0.5)
    run.drafter.zero_grad(set_to_none=True)
    sums.total.backward()
    silent = [n for n, p in run.drafter.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert silent == []
