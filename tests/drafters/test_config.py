"""The schema refuses what no drafter can be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hspec.drafters.config import MambaConfig, ParallelConfig
from hspec.drafters.presets import PRESETS
from hspec.targets.target import Target
from tests.tiny import tiny_config


def changed(target: Target, path: str, value: Any) -> dict[str, Any]:
    fields = tiny_config(target).model_dump()
    place = fields
    *above, last = path.split(".")
    for key in above:
        place = place[key]
    place[last] = value
    return fields


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("windows", 3, "Extra inputs"),
        ("mamba.expand", 2, "Extra inputs"),
        ("format", 3, "Input should be 2"),
        ("method", "eagle3", "Input should be 'hspec'"),
        ("pattern", [], "at least 1"),
        ("pattern", ["mamba", "conv"], "mamba"),
        ("mamba", None, "no mamba section"),
        ("attention", None, "no attention section"),
        ("mamba.groups", 3, "multiple of mamba.groups"),
        ("mamba.heads", 0, "greater than 0"),
        ("attention.kv_heads", 3, "multiple of attention.kv_heads"),
        ("attention.window", 0, "greater than 0"),
        ("attention.rope", [], "attention.rope has 0 entries"),
        ("kv_layers", [1, 2], "kv_layers has 2 entries"),
        ("kv_layers", [6], r"kv_layers \[6\] must lie in 0..5"),
        ("kv_layers", [-1], "must lie in"),
        ("taps", [], "at least 1"),
        ("taps", [3, 1], "must ascend"),
        ("taps", [1, 1], "must ascend"),
        ("taps", [1, 7], "within 0..6"),
        ("taps", [-1, 2], "must ascend within"),
        ("hidden_size", 32, "must be the target's, 64"),
        ("block_size", 1, "leaves no slot to draft"),
        ("block_size", 0, "greater than or equal to 1"),
        ("block_size", 18, "less than or equal to 17"),
        ("draft_vocab_size", 212, "exceeds the target's 211"),
        ("head", None, "needs a Markov head"),
        ("head.rank", 0, "greater than 0"),
        ("head.kind", "rnn", "does not match any of the expected tags"),
        ("attention.window", [5, 6], "attention.window has 2 entries for 1"),
        ("attention.causal_block", [], "attention.causal_block has 0 entries"),
        ("convolution", {"group": 5}, "must divide hidden_size"),
        ("head", {"kind": "selector", "candidates": 200}, "exceeds draft_vocab_size"),
        ("attention.context", "both", "'target', 'features' or 'none'"),
        ("seed_mode", "twice", "'shared', 'per_layer' or 'once'"),
        ("fusion_rank", 0, "greater than 0"),
    ],
)
def test_refused(target: Target, path: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ParallelConfig.model_validate(changed(target, path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("taps", [6]),  # the last layer's output
        ("taps", [0]),  # the embedding
        ("attention.window", None),
        ("block_size", 2),
        ("block_size", 17),
        ("seed_mode", "once"),
        ("draft_vocab_size", 211),
    ],
)
def test_allowed(target: Target, path: str, value: Any) -> None:
    ParallelConfig.model_validate(changed(target, path, value))


def test_no_head_at_all(target: Target) -> None:
    config = tiny_config(target, markov_rank=0, confidence_head=False)
    assert config.max_draft == config.block_size - 1


def test_one_kind_of_mixer_only(target: Target) -> None:
    assert tiny_config(target, pattern=["mamba", "mlp"], attention=None).kv_layers == []
    assert tiny_config(target, pattern=["attention", "mlp"], mamba=None).kv_layers == [5]


def test_does_not_change(target: Target) -> None:
    config = tiny_config(target)
    with pytest.raises(ValidationError, match="frozen"):
        config.block_size = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_round_trip(name: str) -> None:
    assert ParallelConfig.model_validate_json(PRESETS[name].model_dump_json()) == PRESETS[name]


def test_widths_of_the_mixer() -> None:
    mamba = MambaConfig(heads=44)
    assert (mamba.inner, mamba.conv_channels) == (2816, 2816 + 32)
