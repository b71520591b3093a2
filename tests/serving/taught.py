"""Tiny drafters that have learnt some of what a tiny target says, so that drafts of theirs are accepted, and others are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request
from hspec.drafters.config import ParallelConfig
from hspec.drafters.context import DraftContext
from hspec.drafters.drafter import Drafter
from hspec.drafters.methods import configuration
from hspec.targets.cache import KVView
from hspec.targets.target import Target
from hspec.training.config import GrowthStage
from hspec.training.examples import Example
from hspec.training.initialise import initialise
from hspec.training.trainer import Trainer
from tests.tiny import tiny_config
from tests.training.helpers import settings

SLOTS = 4


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random tokens of these numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 150, (n,), generator=generator).tolist() for n in lengths]


def answers(target: Target, asked: Sequence[Sequence[int]], tokens: int) -> list[Example]:
    """What the target says to prompts, as documents to learn from."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    results = Engine(target).generate([Request(tuple(p), params) for p in asked])
    return [
        Example(str(i), [*p, *r.tokens], [False] * len(p) + [True] * len(r.tokens))
        for i, (p, r) in enumerate(zip(asked, results, strict=True))
    ]


def teach(target: Target, method: str, texts: Sequence[Example], folder: Path, steps: int = 60, **changes: Any) -> None:
    """Train a drafter of a method on these texts for a while and save it to ``folder``.

    Args:
        changes: fields of its configuration that are not as :func:`tests.tiny.tiny_config` and the method have them.
    """
    base = tiny_config(target, block_size=SLOTS + 1, window=24, draft_vocab=target.vocab_size)
    config = ParallelConfig.model_validate({**configuration(method, base).model_dump(), **changes})
    new = initialise(config, target, torch.arange(config.draft_vocab_size), seed=1)
    recipe = settings(
        steps=steps, batch_tokens=600, growth=(GrowthStage(start=0.0, slots=SLOTS, density=1.0),), warm_kl_until=0.9, tv_from=1.0,
        learning_rate=3e-3, ema=0.0,
    )  # fmt: skip
    run = Trainer(recipe, target, new, list(texts), list(texts[:2]), folder)
    for _ in range(steps):
        run.train_step()
    run.save()


@torch.no_grad()
def from_scratch(target: Target, drafter: Drafter, tokens: list[int], k: int) -> list[int]:
    """What is drafted behind these tokens if the target runs them at once, and of that the drafter's memory is made, if it has one."""
    cache = target.new_cache(1, len(tokens))
    output = target.forward(torch.tensor([tokens[:-1]]), cache, drafter.taps)
    cache.advance([len(tokens) - 1])
    following = torch.tensor([tokens[1:]])
    keeps, positions = drafter.memory_shape is not None, torch.arange(len(tokens) - 1)[None]
    kept = drafter.remember(output.taps, following, positions, None) if keeps else []
    context = DraftContext(
        anchors=torch.tensor([[tokens[-1]]]),
        positions=torch.tensor([[len(tokens) - 1]]),
        taps=output.taps[:, -1:],
        kv=cache.view(),
        memory=KVView([keys for keys, _ in kept], [values for _, values in kept], (len(tokens) - 1,)) if keeps else None,
    )
    return drafter.propose(context, k).tokens[0].tolist()
