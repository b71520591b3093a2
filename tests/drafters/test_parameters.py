"""Parameters by part add up to what the modules hold."""

from __future__ import annotations

import pytest

from hspec.drafters.config import ParallelConfig
from hspec.drafters.parameters import parameters_by_part
from tests.tiny import tiny_config, tiny_drafter, tiny_target


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"confidence_head": False},
        {"markov_rank": 0, "confidence_with_markov": False},
        {"use_state": False},
        {"fusion_norm": True},
    ],
)
def test_parts_add_up(changes: dict[str, object]) -> None:
    target = tiny_target(layers=3, hidden=48)
    config: ParallelConfig = tiny_config(target, **changes)  # type: ignore[arg-type]
    parts = parameters_by_part(config)
    assert sum(parts.values()) == sum(p.numel() for p in tiny_drafter(target, config=config).parameters())
    assert all(n >= 0 for n in parts.values())
    assert (parts["fusion"] == 0) == (not config.use_state)
    assert (parts["causal_head"] == 0) == (config.markov_rank == 0)
