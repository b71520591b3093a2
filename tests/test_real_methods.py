"""Every method on the real model: it learns from the target's own answers, is saved and read, and decodes losslessly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hspec import SamplingParams, load_target
from hspec.api import make_request
from hspec.decoding.engine import Engine
from hspec.drafters.checkpoint import load_drafter
from hspec.drafters.methods import METHODS, configuration
from hspec.drafters.presets import preset
from hspec.training.config import GrowthStage, TrainConfig
from hspec.training.examples import Example, collate
from hspec.training.initialise import draft_vocabulary, initialise
from hspec.training.objective import LossWeights
from hspec.training.trainer import Trainer
from tests.test_real import PROMPTS

pytestmark = pytest.mark.real

STEPS = 14


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2")


@pytest.fixture(scope="module")
def answers(target) -> list[Example]:
    """The target's own, greedy ones."""
    requests = [make_request(target, prompt, SamplingParams(max_tokens=48)) for prompt in PROMPTS[:12]]
    examples = []
    for i, (request, result) in enumerate(zip(requests, Engine(target).generate(requests), strict=True)):
        tokens = [*request.prompt, *result.tokens]
        examples.append(Example(str(i), tokens, [j >= len(request.prompt) for j in range(len(tokens))]))
    return examples


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    requests = [make_request(target, prompt, SamplingParams(max_tokens=24)) for prompt in PROMPTS[12:15]]
    return [result.tokens for result in Engine(target).generate(requests)]


@torch.no_grad()
def loss_on_all(run: Trainer, answers: list[Example]) -> float:
    """Of the drafter as it is, on every answer, at anchors that are always the same."""
    batch = replace(collate(answers[:6]), documents=tuple(range(6)))
    return float(run.loss(run._blocks(batch, 2, 0.5, 0, run.features), LossWeights(0.1, 0.9, 0.0), 0.0).mean)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.derive is not None])
def test_learns_and_decodes_losslessly(target, answers, plain, tmp_path, method):
    config = configuration(method, preset("smollm2-135m"))
    drafter = initialise(config, target, draft_vocabulary(answers, target, config.draft_vocab_size), 0)
    recipe = TrainConfig(
        steps=STEPS, batch_tokens=220, warmup_steps=2, learning_rate=2e-3, warm_kl_until=1.0, tv_from=1.0,
        growth=(GrowthStage(start=0.0, slots=2, density=0.5),),
    )  # fmt: skip
    run = Trainer(recipe, target, drafter, answers, [], tmp_path)
    before = loss_on_all(run, answers)
    for _ in range(STEPS):
        run.train_step()
    assert loss_on_all(run, answers) < 0.94 * before
    run.save()
    loaded = load_drafter(tmp_path, target).prepare()
    requests = [make_request(target, prompt, SamplingParams(max_tokens=24)) for prompt in PROMPTS[12:15]]
    drafted = Engine(target, loaded).generate(requests)
    assert [result.tokens for result in drafted] == plain
    for name, p in loaded.named_parameters():
        assert torch.isfinite(p).all(), name
