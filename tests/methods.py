"""Drafters of every method at tiny size."""

from __future__ import annotations

from typing import Any

import torch

from hspec.decoding.engine import Drafter as AnyDrafter
from hspec.drafters.checkpoint import build_drafter
from hspec.drafters.drafter import Drafter
from hspec.drafters.methods import METHODS, configuration
from hspec.drafters.ngram import NgramDrafter
from hspec.targets.target import Target
from tests.tiny import randomise, tiny_config

TRAINED = [name for name, method in METHODS.items() if method.derive is not None]
DRAFTING = [name for name in METHODS if name != "ar"]


def trained(target: Target, name: str, seed: int = 0, **settings: Any) -> Drafter:
    """A random drafter of a method; ``settings`` go to :func:`tests.tiny.tiny_config`, which its configuration follows from."""
    config = configuration(name, tiny_config(target, **settings))
    drafter = build_drafter(config, target, torch.arange(config.draft_vocab_size))
    randomise(drafter, seed + 1)
    return drafter.eval().requires_grad_(False)


def drafting(target: Target, name: str, **settings: Any) -> AnyDrafter:
    """The same, or the method that has nothing to train."""
    return NgramDrafter(target.vocab_size) if name == "ngram" else trained(target, name, **settings)
