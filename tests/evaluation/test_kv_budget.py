"""KV bytes from configurations alone: the paper's Table 1, other kinds of targets, and how many requests fit."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, LlamaConfig

from hspec.drafters.methods import METHODS
from hspec.errors import UsageError
from hspec.evaluation.kv_budget import (
    Cache,
    KVCost,
    drafter_weight_bytes,
    kv_costs,
    parse_bytes,
    plan,
    target_caches,
    weight_bytes,
)
from hspec.targets.cache import CacheShape

KIB = 1024


@pytest.mark.parametrize(
    ("target", "kept", "added", "growth"),
    [
        ("qwen3-4b", 144, 20, 1.139),
        ("qwen3-8b", 144, 20, 1.139),
        ("llama-3.1-8b", 128, 20, 1.156),
        ("qwen3.5-27b", 64, 24, 1.375),
        ("qwen3.5-397b-a17b", 30, 24, 1.800),
    ],
)
def test_table_1_of_the_paper(target: str, kept: int, added: int, growth: float) -> None:
    costs = kv_costs(target)
    assert (costs["dflash"].target_bytes, costs["dflash"].drafter_bytes) == (kept * KIB, added * KIB)
    assert round(costs["dflash"].growth, 3) == growth
    assert list(costs) == list(METHODS)
    for name in ("ar", "hspec", "dflash-kv", "ngram", "hspec-domino"):
        assert (costs[name].drafter_bytes, costs[name].growth) == (0, 1.0)


def test_other_types_and_their_arithmetic() -> None:
    cost = kv_costs("qwen3-8b", "fp8")["dflash"]
    assert (cost.target_bytes, cost.drafter_bytes) == (72 * KIB, 10 * KIB)
    said = cost.as_dict()["arithmetic"]
    assert said["target"] == ["36 layers x 8 KV heads x 128 x 2 (K, V) x 1 bytes = 73,728"]
    assert said["drafter"] == "5 layers x 8 KV heads x 128 x 2 (K, V) x 1 bytes = 10,240"
    assert kv_costs("qwen3.5-27b")["hspec"].notes[0].startswith("48 layers of linear attention")
    with pytest.raises(UsageError, match="--kv-dtype fp4: choose one of bf16"):
        kv_costs("qwen3-8b", "fp4")


def saved(config: object, folder: Path) -> str:
    config.save_pretrained(folder)  # type: ignore[attr-defined]
    return str(folder)


def test_layers_that_slide_are_bounded(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=6, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=512, layer_types=["sliding_attention"] * 5 + ["full_attention"], vocab_size=99,
    )  # fmt: skip
    caches, _ = target_caches(saved(config, tmp_path))
    full, sliding = caches
    assert (full.window, sliding.window) == (None, 512)
    assert full.bytes(2000, torch.bfloat16) == 2000 * 1 * 2 * 8 * 2 * 2
    assert sliding.bytes(2000, torch.bfloat16) == sliding.bytes(512, torch.bfloat16) == 512 * 5 * 2 * 8 * 2 * 2
    cost = KVCost("x", "dflash", caches, Cache(CacheShape(1, 2, 8)), torch.bfloat16)
    assert cost.growth == 2.0, "a further token costs the full layer's bytes, and the drafter's"
    assert "at most 512 tokens" in cost.as_dict()["arithmetic"]["target"][1]


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=99)
    config.kv_lora_rank = 16
    with pytest.raises(UsageError, match="latent attention"):
        target_caches(saved(config, tmp_path))


def test_a_plan() -> None:
    """80 GB less 16.4 GB of weights, 1.4 of the drafter and 4 in reserve, at 8,192 tokens of 144 or 164 KiB."""
    cost = kv_costs("qwen3-8b")["dflash"]
    found = plan(cost, 80e9, 16e9, 1e9, 8192, 1, 4e9)
    assert found.free_bytes == 59e9
    assert found.request_bytes == 8192 * 164 * KIB
    assert (found.requests, found.without_drafter_cache) == (int(59e9 // (8192 * 164 * KIB)), int(59e9 // (8192 * 144 * KIB)))
    two = plan(cost, 80e9, 16e9, 1e9, 8192, 2, 4e9)
    assert (two.free_bytes, two.request_bytes) == (67e9, 8192 * 82 * KIB)
    many = plan(cost, 80e9, 16e9, 1e9, 8192, 16, 4e9)  # 8 KV heads on 16 GPUs: each holds one, every head lies on two
    assert many.request_bytes == 8192 * 164 * KIB // 8
    with pytest.raises(UsageError, match=r"nothing is left for KV: of 20.0 GB a GPU, 16.0 GB are the target's weights"):
        plan(cost, 20e9, 16e9, 1e9, 8192, 1, 4e9)


@given(st.integers(1, 200_000), st.sampled_from([1, 2, 4, 8]))
def test_a_cache_of_its_own_never_leaves_more_room(context: int, ranks: int) -> None:
    shape = Cache(CacheShape(36, 8, 128))
    with_cache = KVCost("t", "dflash", (shape,), Cache(CacheShape(5, 8, 128)), torch.bfloat16)
    without = KVCost("t", "hspec", (shape,), None, torch.bfloat16)
    a, b = (plan(c, 80e9, 16e9, 0, context, ranks, 0) for c in (with_cache, without))
    assert a.requests <= a.without_drafter_cache == b.requests == b.without_drafter_cache


def test_weights() -> None:
    assert weight_bytes("qwen3-8b") == pytest.approx(16.4e9, rel=0.01)
    assert weight_bytes("qwen3-4b") == pytest.approx(8.0e9, rel=0.02)
    assert weight_bytes("llama-3.1-8b") == pytest.approx(16.1e9, rel=0.01)
    with pytest.raises(UsageError, match="give --weights"):
        weight_bytes("qwen3.5-27b")
    assert drafter_weight_bytes(None) == 0


def test_sizes_in_words() -> None:
    assert parse_bytes("--memory", "80GB") == 80e9
    assert parse_bytes("--memory", "24 gib") == 24 * 2**30
    assert parse_bytes("--memory", "500MB") == 5e8
    assert parse_bytes("--memory", "1024") == 1024
    for wrong in ("", "GB", "-3GB", "3XB", "nan"):
        with pytest.raises(UsageError, match="--memory"):
            parse_bytes("--memory", wrong)


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hspec import cli

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hspec", "kv", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    code, out, _ = run("--target", "qwen3.5-397b-a17b", "--method", "dflash", "--json")
    said = json.loads(out)
    assert (code, said["target_bytes"], said["drafter_bytes"], said["growth"]) == (0, 30720, 24576, 1.8)
    code, out, _ = run("--target", "qwen3-8b", "--memory", "80GB", "--json")
    rows = {row["method"]: row for row in json.loads(out)}
    assert list(rows) == list(METHODS)
    assert rows["hspec"]["plan"]["more"] == 0 < rows["dflash"]["plan"]["more"]
    code, out, err = run("--target", "qwen3-8b", "--method", "dflush")
    assert (code, out) == (2, "") and "there are ar, hspec, dspark" in err
