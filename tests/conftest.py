"""Fixtures that every test module may use."""

from __future__ import annotations

import os

import pytest
import torch

from hspec.drafters.parallel import ParallelDrafter
from hspec.targets.target import Target
from tests.tiny import tiny_drafter, tiny_target


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes of tests each has its share of the cores: threads that wait for each other's cores take many times as long."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    threads = max(1, torch.get_num_threads() // worker["workercount"])
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes that tests start


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
