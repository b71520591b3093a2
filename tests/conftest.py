"""Fixtures that every test module may use."""

from __future__ import annotations

import pytest
import torch

from hspec.drafters.parallel import ParallelDrafter
from hspec.targets.target import Target
from tests.tiny import tiny_drafter, tiny_target


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def target() -> Target:
    """A tiny Llama. Shared by all tests: do not change it."""
    return tiny_target("llama")


@pytest.fixture(scope="session")
def qwen_target() -> Target:
    """A tiny Qwen3. Shared by all tests: do not change it."""
    return tiny_target("qwen3")


@pytest.fixture
def drafter(target: Target) -> ParallelDrafter:
    """A random drafter for ``target``, new for each test."""
    return tiny_drafter(target)
