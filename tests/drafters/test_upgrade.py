"""Checkpoints of format 1 become what format 2 means by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hspec.drafters.config import MarkovConfig, ParallelConfig
from hspec.drafters.upgrade import upgrade_config, upgrade_weights
from hspec.targets.target import Target
from tests.tiny import tiny_config


def old(target: Target, rank: int = 8, reads: bool = True, **changes: Any) -> dict[str, Any]:
    """A configuration as format 1 had it."""
    raw = tiny_config(target).model_dump()
    for new in ("head", "convolution", "sample_from_anchor"):
        raw.pop(new)
    for new in ("context", "causal_block"):
        raw["attention"].pop(new)
    return {**raw, "format": 1, "markov_rank": rank, "use_target_kv": reads, **changes}


@pytest.mark.parametrize(("reads", "context"), [(True, "target"), (False, "none")])
def test_the_target_kv(target: Target, reads: bool, context: str) -> None:
    config = ParallelConfig.model_validate(upgrade_config(old(target, reads=reads)))
    assert config.attention is not None and config.attention.context == context
    assert config == tiny_config(target, context=context)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 4])
def test_the_markov_head(target: Target, rank: int) -> None:
    config = ParallelConfig.model_validate(upgrade_config(old(target, rank, confidence_with_markov=bool(rank))))
    assert config.head == (MarkovConfig(rank=rank) if rank else None)


def test_what_was_left_out_had_defaults(target: Target) -> None:
    raw = {k: v for k, v in old(target).items() if k not in ("markov_rank", "use_target_kv")}
    config = ParallelConfig.model_validate(upgrade_config(raw))
    assert config.markov_rank == 256 and config.attention is not None and config.attention.context == "target"


def test_without_attention(target: Target) -> None:
    raw = old(target, pattern=["mamba", "mlp"], kv_layers=[], attention=None)
    assert ParallelConfig.model_validate(upgrade_config(raw)).attention is None


def test_the_input_is_left_alone_and_a_new_one_is_not_changed(target: Target) -> None:
    raw = old(target)
    copy = {**raw, "attention": dict(raw["attention"])}
    upgrade_config(raw)
    assert raw == copy
    new = tiny_config(target).model_dump()
    assert upgrade_config(new) is new
    assert upgrade_config({"method": "hspec"}) == {"method": "hspec"}  # no format at all: for the schema to judge


def test_unknown_keys_are_left_for_the_schema(target: Target) -> None:
    assert upgrade_config(old(target, surprise=1))["surprise"] == 1
    assert upgrade_config({**old(target), "format": 3})["format"] == 3


def test_names_of_weights() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    assert upgrade_weights({"markov.w1.weight": one, "norm.weight": two}) == {"causal.w1.weight": one, "norm.weight": two}
    assert upgrade_weights({"causal.w1.weight": one}) == {"causal.w1.weight": one}
