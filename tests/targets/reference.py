"""Tiny random models of every supported family, each as a target and as transformers runs it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from tests.tiny import VOCABULARY, randomise, tiny_tokenizer

LAYERS, WINDOW = 4, 8
"""The window is shorter than the texts of the tests, so that it must be cropped."""

CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "gemma3_text": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 5.0,
        },
    ),
}


def reference_model(case: str, **overrides: Any) -> nn.Module:
    """As transformers makes it, with its plainest attention."""
    config_type, model_type, own = CASES[case]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    model = model_type(config_type(**(settings | own | overrides)))
    randomise(model, 1)
    model.set_attn_implementation("eager")
    return model.eval()


def reference_target(case: str, linears: Literal["packed", "bf16", "plain"] = "packed", **overrides: Any) -> Target:
    """The same weights as :func:`reference_model`."""
    return Target(reference_model(case, **overrides), ChatTemplate(tiny_tokenizer()), case).prepare(linears)


def random_tokens(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
