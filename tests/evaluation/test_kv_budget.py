"""KV bytes from configurations alone: the paper's Table 1, other kinds of targets, and how many requests fit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, MistralConfig, PreTrainedConfig

from hspec.drafters.checkpoint import CONFIG_FILE
from hspec.drafters.methods import METHODS
from hspec.drafters.presets import preset
from hspec.errors import UsageError
from hspec.evaluation.kv_budget import RECURRENT, Cache, KVCost, TargetMemory, kv_cost, kv_costs, target_memory
from hspec.evaluation.kv_plan import parse_bytes, plan, weight_bytes
from hspec.targets.cache import CacheShape

KIB = 1024
ASSUMED = "that the published drafters have this K/V shape is an assumption: it makes the 24 KiB that the paper gives"


@pytest.mark.parametrize(
    ("target", "kept", "added", "growth", "notes"),
    [
        ("qwen3-4b", 144, 20, 1.139, ()),
        ("qwen3-8b", 144, 20, 1.139, ()),
        ("llama-3.1-8b", 128, 20, 1.156, ()),
        ("qwen3.5-27b", 64, 24, 1.375, (ASSUMED,)),
        ("qwen3.5-397b-a17b", 30, 24, 1.800, (ASSUMED,)),
    ],
)
def test_table_1_of_the_paper(target: str, kept: int, added: int, growth: float, notes: tuple[str, ...]) -> None:
    cost = kv_costs(target, methods=["dflash"])["dflash"]
    assert (cost.target_bytes, cost.drafter_bytes, cost.notes) == (kept * KIB, added * KIB, notes)
    assert round(cost.growth, 3) == growth


def test_every_method_is_counted() -> None:
    costs = kv_costs("smollm2")
    assert list(costs) == list(METHODS)
    assert {name for name, cost in costs.items() if cost.drafter_bytes} == {
        name for name, method in METHODS.items() if method.context == "own KV"
    }
    assert {cost.growth for cost in costs.values() if not cost.drafter_bytes} == {1.0}
    with pytest.raises(UsageError, match="no method 'dflush'; there are ar, hspec"):
        kv_costs("smollm2", methods=["dflush"])


def test_other_types_and_their_arithmetic() -> None:
    cost = kv_costs("qwen3-8b", "fp8", ["dflash"])["dflash"]
    assert (cost.target_bytes, cost.drafter_bytes) == (72 * KIB, 10 * KIB)
    said = cost.as_dict()["arithmetic"]
    assert said["target"] == ["36 layers x 8 KV heads x 128 x 2 (K, V) x 1 bytes = 73,728"]
    assert said["drafter"] == "5 layers x 8 KV heads x 128 x 2 (K, V) x 1 bytes = 10,240"
    with pytest.raises(UsageError, match="--kv-dtype fp4: choose one of bf16"):
        kv_costs("qwen3-8b", "fp4", ["ar"])


def test_linear_attention_keeps_a_state_of_fixed_size() -> None:
    """48 layers of 48 matrices of 128 x 128 in fp32, and 3 inputs of a convolution over 2 x 2,048 + 6,144 channels in bf16."""
    cost = kv_costs("qwen3.5-27b", "fp8", ["hspec"])["hspec"]
    assert cost.as_dict()["state_bytes_a_request"] == 48 * (48 * 128 * 128 * 4 + 10_240 * 3 * 2), "whatever the type of K and V"
    assert "48 layers of linear attention" in cost.as_dict()["arithmetic"]["state"]
    state = RECURRENT["Qwen/Qwen3.5-397B-A17B"]
    assert state.layers == 60 - kv_costs("qwen3.5-397b-a17b", methods=["ar"])["ar"].kept.caches[0].shape.layers
    assert 8 * state.bytes(8) == state.bytes()
    with pytest.raises(UsageError, match="--tp 3 does not divide the 16 key and 64 value heads"):
        state.bytes(3)
    assert kv_costs("qwen3-8b", methods=["ar"])["ar"].as_dict()["state_bytes_a_request"] == 0


Saved = Callable[[PreTrainedConfig], str]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    def save(config: PreTrainedConfig) -> str:
        config.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def test_layers_that_slide_are_bounded(saved: Saved) -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=6, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=512, layer_types=["sliding_attention"] * 5 + ["full_attention"], vocab_size=99,
    )  # fmt: skip
    kept = target_memory(saved(config))
    full, sliding = kept.caches
    assert (full.window, sliding.window) == (None, 512)
    assert full.bytes(2000, torch.bfloat16) == 2000 * 1 * 2 * 8 * 2 * 2
    assert sliding.bytes(2000, torch.bfloat16) == sliding.bytes(512, torch.bfloat16) == 512 * 5 * 2 * 8 * 2 * 2
    cost = KVCost("x", "dflash", kept, Cache(CacheShape(1, 2, 8)), 0, torch.bfloat16)
    assert cost.growth == 2.0, "a further token costs the full layer's bytes, and the drafter's"
    assert "at most 512 tokens" in cost.as_dict()["arithmetic"]["target"][1]
    a_request = 2000 * (64 + 64) + 512 * 5 * 64
    assert plan(cost, 1e9, 0, 2000, 1, 0).request_bytes == a_request


def test_a_target_whose_layers_all_slide_does_not_grow(saved: Saved) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}
    assert target_memory(saved(MistralConfig(**sizes, sliding_window=None))).caches == (Cache(CacheShape(2, 2, 8)),)
    with pytest.raises(UsageError, match="does not grow past 64 tokens"):
        target_memory(saved(MistralConfig(**sizes, sliding_window=64)))


def test_latent_attention_is_refused_by_name(saved: Saved) -> None:
    with pytest.raises(UsageError, match="family 'deepseek_v3'"):
        target_memory(saved(DeepseekV3Config(num_hidden_layers=2)))


def test_a_drafter_of_its_own() -> None:
    cost = kv_cost("qwen3-8b", preset("qwen3-8b"))
    assert (cost.method, cost.drafter_bytes) == ("hspec", 0)
    assert cost.drafter_weights == kv_costs("qwen3-8b", methods=["hspec"])["hspec"].drafter_weights
    with pytest.raises(
        UsageError, match=r"the drafter is for Qwen/Qwen3-8B \(36 layers of 4096\), not for smollm2 \(30 of 576\)"
    ):
        kv_cost("smollm2", preset("qwen3-8b"))


# -- planning ----------------------------------------------------------------------------------------------------


def test_a_plan() -> None:
    """80 GB less 16 of the target's weights, 1 of the drafter's and 4 in reserve, at 8,192 tokens of 144 or 164 KiB."""
    cost = replace(kv_costs("qwen3-8b", methods=["dflash"])["dflash"], drafter_weights=10**9)
    found = plan(cost, 80e9, 16e9, 8192, 1, 4e9)
    assert found.free_bytes == 59e9
    assert found.request_bytes == 8192 * 164 * KIB
    assert (found.requests, found.without_drafter_cache) == (int(59e9 // (8192 * 164 * KIB)), int(59e9 // (8192 * 144 * KIB)))
    assert found.as_dict()["more"] == found.without_drafter_cache - found.requests > 0
    assert "= 59.0 GB; 8,192 tokens: 1,207,959,552 of KV + 0 of state + 167,772,160 of" in found.arithmetic
    two = plan(cost, 80e9, 16e9, 8192, 2, 4e9)
    assert (two.free_bytes, two.request_bytes) == (67.5e9, 8192 * 82 * KIB)
    many = plan(cost, 80e9, 16e9, 8192, 16, 4e9)  # 8 KV heads on 16 GPUs: each holds one, every head lies on two
    assert many.request_bytes == 8192 * 164 * KIB // 8


def test_a_plan_counts_states() -> None:
    cost = kv_costs("qwen3.5-27b", methods=["hspec"])["hspec"]
    assert plan(cost, 80e9, 54e9, 4096, 1, 4e9).request_bytes == 4096 * 64 * KIB + 153_944_064


def test_plans_that_cannot_be() -> None:
    cost = replace(kv_costs("qwen3-8b", methods=["dflash"])["dflash"], drafter_weights=0)
    with pytest.raises(
        UsageError, match=r"nothing is left for requests: 16.0 GB a GPU - 4.0 GB in reserve - 16.0 GB of the targ"
    ):
        plan(cost, 16e9, 16e9, 8192, 1, 4e9)
    with pytest.raises(UsageError, match="--tp 3 does not divide the 32 attention heads of qwen3-8b"):
        plan(cost, 80e9, 16e9, 8192, 3, 4e9)
    odd = KVCost("x", "ar", TargetMemory(24, (Cache(CacheShape(4, 6, 64)),)), None, 0, torch.bfloat16)
    with pytest.raises(UsageError, match="--tp 4 does not divide 6 KV heads, nor do they divide it"):
        plan(odd, 80e9, 16e9, 8192, 4, 4e9)


@given(st.integers(1, 200_000), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_cache_of_its_own_never_leaves_more_room(context: int, ranks: int) -> None:
    kept = TargetMemory(32, (Cache(CacheShape(36, 8, 128)),))
    with_cache = KVCost("t", "dflash", kept, Cache(CacheShape(5, 8, 128)), 0, torch.bfloat16)
    a, b = (plan(c, 80e9, 16e9, context, ranks, 0) for c in (with_cache, replace(with_cache, drafter_cache=None)))
    assert a.requests <= a.without_drafter_cache == b.requests == b.without_drafter_cache
    assert a.requests * a.request_bytes <= a.free_bytes < (a.requests + 1) * a.request_bytes


def test_weights(saved: Saved) -> None:
    assert weight_bytes("qwen3-8b") == pytest.approx(16.4e9, rel=0.01)
    assert weight_bytes("qwen3-4b") == pytest.approx(8.0e9, rel=0.02)
    assert weight_bytes("llama-3.1-8b") == pytest.approx(16.1e9, rel=0.01)
    assert weight_bytes("smollm2") == pytest.approx(2 * 134.5e6, rel=0.01)
    with pytest.raises(UsageError, match="give --weights"):
        weight_bytes("qwen3.5-27b")
    own = LlamaConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=16, num_attention_heads=2, vocab_size=10)
    assert weight_bytes(saved(own)) == 2 * (2 * 10 * 8 + 4 * 8 * 8 + 3 * 8 * 16)


def test_sizes_in_words() -> None:
    assert parse_bytes("--memory", "80GB") == 80e9
    assert parse_bytes("--memory", "24 gib") == 24 * 2**30
    assert parse_bytes("--memory", "500MB") == 5e8
    assert parse_bytes("--memory", "1024") == 1024
    for wrong in ("", "GB", "-3GB", "3XB", "nan"):
        with pytest.raises(UsageError, match="--memory"):
            parse_bytes("--memory", wrong)


# -- the command -------------------------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def command(*arguments: str) -> tuple[int, str, str]:
        from hspec import cli

        monkeypatch.setattr("sys.argv", ["hspec", "kv", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return command


def test_command(run: Run) -> None:
    code, out, _ = run("--target", "qwen3.5-397b-a17b", "--method", "dflash", "--json")
    said = json.loads(out)
    assert (code, said["target_bytes"], said["drafter_bytes"], said["growth"]) == (0, 30720, 24576, 1.8)
    code, out, _ = run("--memory", "80GB", "--json")
    rows = {row["method"]: row for row in json.loads(out)}
    assert list(rows) == list(METHODS)
    assert rows["hspec"]["plan"]["more"] == 0 < rows["dflash"]["plan"]["more"]
    code, out, _ = run("--method", "dflash", "--memory", "8GB", "--kv-dtype", "fp8")
    text = " ".join(out.split())
    for piece in ("1.133", "target: 30 layers x 3 KV heads x 64 x 2 (K, V) x 1 bytes = 11,520", "plan: 8.0 GB a GPU - 4.0 GB"):
        assert piece in text


def test_command_with_a_drafter(run: Run, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(preset("qwen3-8b").model_dump_json())
    code, out, _ = run("--target", "qwen3-8b", "--drafter", str(tmp_path), "--json")
    assert (code, json.loads(out)["method"], json.loads(out)["growth"]) == (0, "hspec", 1.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "dflush"], "no method 'dflush'"),
        (["--method", "dflash", "--drafter", "x"], "leave out one of them"),
        (["--method", "ar", "--tp", "2"], "--tp is for planning, and nothing is planned: give --memory"),
        (["--method", "ar", "--memory", "much"], "--memory much: give a size"),
    ],
)
def test_command_refuses(run: Run, arguments: list[str], says: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and says in " ".join(err.split())
