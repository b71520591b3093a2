"""Targets and drafters that cannot be served are refused by name, in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hspec.drafters.checkpoint import check_target
from hspec.drafters.methods import configuration
from hspec.drafters.source import NOTHING, Around
from hspec.errors import UsageError
from hspec.serving.settings import additional_config, around_of, drafter_of, speculative_config
from hspec.serving.targets import ServedTarget, TemplateHash, folder_hash, refusal, require_servable
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from tests.tiny import tiny_config, tiny_tokenizer


def vllm_config(model: dict[str, Any] | None = None, **others: Any) -> SimpleNamespace:
    """Like ``vllm.config.VllmConfig``, as far as the checks look; ``text`` within ``model`` is transformers' configuration."""
    given = dict(model or {})
    text = SimpleNamespace(**({"model_type": "llama"} | given.pop("text", {})))
    fields = {"model": "org/model", "quantization": None, "use_mla": False, "is_hybrid": False, "is_multimodal_model": False}
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(**(fields | given), hf_text_config=text),
        parallel_config=SimpleNamespace(**(parallel | others.get("parallel", {}))),
        cache_config=SimpleNamespace(cache_dtype=others.get("cache", "auto")),
        kv_transfer_config=others.get("transfer"),
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_supported(family):
    assert refusal(vllm_config({"text": {"model_type": family, "sliding_window": None}})) is None
    assert refusal(vllm_config({"text": {"model_type": family}}, parallel={"tensor_parallel_size": 8})) is None


def test_a_window_that_is_switched_off_is_none():
    assert refusal(vllm_config({"text": {"model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False}})) is None


@pytest.mark.parametrize(
    "config, why",
    [
        (vllm_config({"text": {"model_type": "gemma3_text"}}), "its family is 'gemma3_text'"),
        (vllm_config({"text": {"sliding_window": 4096}}), "sliding window"),
        (vllm_config({"text": {"layer_types": ["full_attention", "sliding_attention"]}}), "sliding window"),
        (vllm_config({"use_mla": True}), "MLA"),
        (vllm_config({"is_hybrid": True}), "hybrid"),
        (vllm_config({"is_multimodal_model": True}), "multimodal"),
        (vllm_config({"quantization": "awq"}), "quantised (awq)"),
        (vllm_config(cache="fp8"), "KV cache is quantised (fp8)"),
        (vllm_config(parallel={"pipeline_parallel_size": 2}), "pipeline stages"),
        (vllm_config(parallel={"decode_context_parallel_size": 2}), "its context is spread"),
        (vllm_config(parallel={"prefill_context_parallel_size": 2}), "its prompts are spread"),
        (vllm_config(transfer=object()), "transferred"),
    ],
)
def test_refused_by_name(config, why):
    message = refusal(config)
    assert message.startswith("H-Spec cannot serve org/model: ") and why in message and "serve it with vLLM alone" in message


def test_drafters(target):
    require_servable(tiny_config(target), 5, "there")
    with pytest.raises(UsageError, match="6 drafts a step, but the drafter at there was trained for 1 to 5"):
        require_servable(tiny_config(target), 6, "there")
    require_servable(tiny_config(target, context="features", method="dflash"), 3, "there")
    eagle = configuration("eagle3", tiny_config(target))
    with pytest.raises(UsageError, match="at there is of the method 'eagle3', which this plugin does not serve"):
        require_servable(eagle, 3, "there")


def test_the_drafter_is_named_by_the_server():
    assert drafter_of(additional_config(drafter_of({"hspec_drafter": "/some/where"}))) == drafter_of(
        {"hspec_drafter": "/some/where"}
    )
    assert speculative_config(4)["num_speculative_tokens"] == 4
    for nothing in ({}, {"hspec_drafter": ""}, None, {"hspec_drafter": 3}):
        with pytest.raises(UsageError, match="no drafter is named"):
            drafter_of(nothing)


@pytest.mark.parametrize("around", [NOTHING, Around(True), Around(False, 0.4), Around(True, 0.125)], ids=str)
def test_what_is_put_around_the_drafter_is_told_in_the_configuration(around: Around) -> None:
    told = json.loads(json.dumps(additional_config(Path("/some/where"), around)))
    assert around_of(told) == around and drafter_of(told) == Path("/some/where")


def test_nothing_else_is_understood() -> None:
    assert around_of({}) == around_of(None) == NOTHING
    with pytest.raises(UsageError, match="hspec_lookup in --additional-config is 'yes': give true or false"):
        around_of({"hspec_lookup": "yes"})
    for chance in (0, 1, 1.5, -0.2, True, "0.4", float("nan")):
        with pytest.raises(UsageError, match=r"hspec_sure in --additional-config is .*: give a chance above 0 and below 1"):
            around_of({"hspec_sure": chance})


@pytest.mark.parametrize("tied", [True, False])
def test_the_hash_of_a_folder_is_that_of_the_loaded_model(tmp_path, tied):
    config = LlamaConfig(
        vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    template = ChatTemplate(tiny_tokenizer())
    loaded = Target(model, template, "tiny").prepare("plain")
    assert folder_hash(tmp_path, config) == loaded.weight_hash()
    assert folder_hash(tmp_path / "elsewhere", config) is None
    served = ServedTarget(str(tmp_path), config, TemplateHash(template.hash), torch.empty(0), torch.empty(0))
    assert served.cache_shape == loaded.cache_shape and len(served.layers) == 2
    assert served.weight_hash() == loaded.weight_hash()


def test_a_drafter_for_another_target_is_refused(target):
    other = SimpleNamespace(
        model_type="llama", num_hidden_layers=6, hidden_size=64, vocab_size=500, num_key_value_heads=2, head_dim=16
    )
    served = ServedTarget("other", other, TemplateHash(""), torch.empty(0), torch.empty(0))
    with pytest.raises(UsageError, match=r"made for tiny-llama \(vocab_size 211\), not for other \(vocab_size 500\)"):
        check_target(tiny_config(target), served)
