"""Costs are measured on drafters and contexts of the right sizes, in turn, and too large contexts are refused."""

import pytest
import torch

from hspec.drafters.presets import PRESETS
from hspec.errors import UsageError
from hspec.evaluation.compare import configurations
from hspec.evaluation.costs import DraftingCase, drafting_costs, in_turn, layer_target, random_drafter, verification_costs
from hspec.targets.target import Target

CONFIGS = {name: config for name, config in configurations("smollm2").items() if config is not None}


@pytest.mark.parametrize("name", ["hspec", "dspark", "dflash2", "eagle3", "redrafter"])
def test_a_case_drafts_and_injects(name: str) -> None:
    drafter = random_drafter(CONFIGS[name])
    case = DraftingCase(CONFIGS[name], 2, 9, drafter)
    before = None if case.memory is None else [k.clone() for k in case.memory.keys]
    case.propose()
    case.inject()
    if before is None:
        assert drafter.memory_shape is None
        return
    assert case.memory is not None and case.memory.lengths == [9, 9]
    for old, new in zip(before, case.memory.keys, strict=True):
        assert torch.equal(old[:, :, :9], new[:, :, :9]), "what was kept stays"
        assert not torch.equal(old[:, :, 9:], new[:, :, 9:]), "and the new tokens lie behind it"


def test_all_sizes_of_all_methods() -> None:
    configs = {name: CONFIGS[name] for name in ("hspec", "dflash")}
    costs = drafting_costs(configs, [1, 2], [4], repeats=1)
    assert [(c.method, c.concurrency, c.length) for c in costs] == [
        ("hspec", 1, 4), ("dflash", 1, 4), ("hspec", 2, 4), ("dflash", 2, 4),
    ]  # fmt: skip
    assert all(c.propose_ms > 0 for c in costs)
    assert [c.inject_ms > 0 for c in costs] == [False, True, False, True]
    assert all(c.total_ms == c.propose_ms + c.inject_ms for c in costs)


def test_contexts_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match=r"contexts of 64 x 100,000 tokens take .* GB, more than 1.0"):
        drafting_costs({"hspec": CONFIGS["hspec"]}, [64], [100_000], max_bytes=1e9)


def test_calls_take_turns() -> None:
    order: list[str] = []
    times = in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2)
    assert order == ["a", "b"] * 3, "one round to warm up"
    assert set(times) == {"a", "b"} and min(times.values()) >= 0


def test_a_forward_by_rows(target: Target) -> None:
    costs = verification_costs(target, [1, 3], [8, 20], repeats=1)
    assert [(c.rows, c.length) for c in costs] == [(1, 8), (3, 8), (1, 20), (3, 20)]
    assert all(c.ms > 0 for c in costs)


def test_a_layer_of_a_target_that_is_not_here() -> None:
    layer = layer_target(PRESETS["smollm2-135m"], layers=2)
    assert (len(layer.layers), layer.hidden_size, layer.cache_shape.kv_heads) == (2, 576, 3)
    assert "random" in layer.name and "smollm2" in layer.name
    with pytest.raises(UsageError, match="qwen3_5_text"):
        layer_target(PRESETS["qwen3.5-27b"])
